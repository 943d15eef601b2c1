"""CRIU: where it is, whether it works here, and the two things that are done with it.

It runs as a process of the holder's, in a session of its own, with a deadline; who outlasts it is killed.
"""

import functools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from msgspec import Struct

from worker.images import refill

INSTALLED: Final = Path("/opt/enginehouse/criu/criu")
"""Where `compose/install-criu` puts it."""
CHECK_S: Final = 15.0
_TAIL: Final = 600
MOST_THREADS: Final = 16
"""That fill an engine's memory. On 32 cores 16 took 320 ms where 8 took 397, and more were not tried."""
LEFT_BEHIND: Final = ("--tcp-close", "--ext-unix-sk")
"""Connections that a library forgot (gloo's to itself) come back closed. Parked engines use none."""


class Criu(Struct, frozen=True):
    """A CRIU that was found. `refusal`: why it can't be used here; empty when it can."""

    path: str
    version: str
    refusal: str = ""


def find(data: Path, given: str = "") -> Path | None:
    """The settings' own, `DIR/criu/criu`, what the installer left, or the PATH's; None: there is none.

    The installer's goes before the PATH's: it was checked here, and a distribution's is often too old.
    """
    named = (Path(given) if given else None, data / "criu" / "criu", INSTALLED, shutil.which("criu"))
    return next((Path(path) for path in named if path and os.access(path, os.X_OK) and Path(path).is_file()), None)


@functools.cache
def probe(path: Path) -> Criu:
    """Ask a CRIU for its version and let it check the kernel (some tens of ms). Kept for the process's life."""
    try:
        version = _said([str(path), "--version"]).partition("\n")[0].removeprefix("Version:").strip()
        checked = subprocess.run([str(path), "check"], capture_output=True, text=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Criu(str(path), "", f"it does not start: {error}")
    if checked.returncode != 0:
        lines = (checked.stderr + checked.stdout).strip().splitlines()
        return Criu(str(path), version, lines[-1][-_TAIL:] if lines else f"check: status {checked.returncode}")
    return Criu(str(path), version)


def dump_argv(criu: str, pid: int, directory: str, nothing: str) -> list[str]:
    """Write process tree `pid` to `directory` and end it. `nothing`: an empty directory, where plug-ins are not."""
    return [
        criu, "dump", "-t", str(pid), "-D", directory, "-o", "dump.log", "-v1", "--libdir", nothing,
        "--manage-cgroups=ignore", "--link-remap", *LEFT_BEHIND,
    ]  # fmt: skip


def restore_argv(criu: str, directory: str, work: str, nothing: str, script: str = "") -> list[str]:
    """Bring the tree back as a child of whoever runs this. What CRIU says goes to `work`, not to the image.

    `script` is run at each stage of it, and ends it by failing.
    """
    return [
        criu, "restore", "-D", directory, "-W", work, "-o", "restore.log", "-v1", "--libdir", nothing,
        "--manage-cgroups=ignore", "--restore-detached", "--restore-sibling", *LEFT_BEHIND,
        *(("--action-script", script) if script else ()),
    ]  # fmt: skip


def refill_script(directory: Path, pid: int, path: Path, mark: Path) -> bool:
    """Write what CRIU is to run for this image (`bulk.py`) to `path`; False: it has no bulk. Raises OSError."""
    if not (directory / f"bulk-{pid}.map").is_file():
        return False
    stamp = refill.stamp(*((directory / f"bulk-{pid}.{kind}").stat() for kind in ("map", "img")))
    threads = filling_threads(len(os.sched_getaffinity(0)))
    argv = [sys.executable, "-ISP", refill.__file__, str(directory), str(pid), stamp, str(threads), str(mark)]
    path.write_text(
        f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-restore ] || exit 0\nexec {shlex.join(argv)}\n', encoding="utf-8"
    )
    path.chmod(0o700)
    return True


def filling_threads(cores: int) -> int:
    """How many fill an engine's memory where the process may run on so many cores: each keeps one busy, until memory is."""
    return max(1, min(MOST_THREADS, cores))


def last_words(log: Path) -> str:
    """The errors of a CRIU log, or its end."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    errors = [line for line in lines if "Error" in line and "RLIMIT" not in line]
    return "; ".join((errors or lines)[-4:])[-_TAIL:]


def _said(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=CHECK_S, check=True).stdout
