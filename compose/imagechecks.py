"""Whether engines can be saved to disk on this machine, and how far down the ladder reaches; each line with its cure."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from compose.check import Check
from controlplane.plane import Plane
from controlplane.settings import SettingsError, read
from worker import namespaces
from worker.images import criu

_INSTALL: Final = "Run compose/install-criu as root: it installs a fit CRIU beside the system's, and replaces nothing."
_NEEDED: Final = {21: "SYS_ADMIN", 19: "SYS_PTRACE", 12: "NET_ADMIN"}
"""Capabilities by their bit, as CRIU and namespaces need them."""


def image_checks(data: Path) -> Iterator[Check]:
    """What saved images need, and last what the ladder reaches."""
    lines = [_criu(data), _capabilities(), _namespaces(), _ptrace(), _io_uring(), _amx()]
    yield from lines
    yield _ladder(lines)


def _criu(data: Path) -> Check:
    path = criu.find(data, _given(data))
    if path is None:
        return Check(name="criu", verdict="note", found="not found", cure=_INSTALL)
    known = criu.probe(path)
    if known.refusal:
        found = f"{known.version or path}: its check says: {known.refusal}"
        return Check(name="criu", verdict="note", found=found, cure=_INSTALL)
    return Check(name="criu", verdict="ok", found=f"{known.version} at {path}: its check is good")


def _given(data: Path) -> str:
    """The CRIU that the settings of the plane here name."""
    try:
        plane = Plane.read(data)
        return read(Path(plane.settings_path)).node.criu if plane.settings_path else plane.criu
    except (FileNotFoundError, SettingsError, ValueError):
        return ""


def _capabilities() -> Check:
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    held = int(next(line.split()[1] for line in text.splitlines() if line.startswith("CapEff:")), 16)
    missing = [name for bit, name in _NEEDED.items() if not held >> bit & 1]
    if missing:
        cure = f"Run as root; in a container add {' '.join(f'--cap-add={name}' for name in missing)}."
        return Check(name="capabilities", verdict="note", found=f"without {', '.join(missing)}", cure=cure)
    return Check(name="capabilities", verdict="ok", found="all that saving engines takes")


def _namespaces() -> Check:
    if (why := namespaces.possible()) is None:
        return Check(name="namespaces", verdict="ok", found="engines get pid, mount, network and IPC namespaces of their own")
    return Check(
        name="namespaces", verdict="note", found=f"{why}: one image can be in use by one engine at a time",
        cure="Run as root, or in a container with --privileged.",
    )  # fmt: skip


def _ptrace() -> Check:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = path.read_text(encoding="ascii").strip() if path.exists() else "0"
    if scope == "3":
        cure = "It can be changed at boot only: set kernel.yama.ptrace_scope to 2 or less."
        return Check(name="ptrace", verdict="note", found="ptrace_scope 3: nobody may look into a process", cure=cure)
    return Check(name="ptrace", verdict="ok", found=f"ptrace_scope {scope}")


def _io_uring() -> Check:
    path = Path("/proc/sys/kernel/io_uring_disabled")
    state = path.read_text(encoding="ascii").strip() if path.exists() else "absent"
    return Check(name="io_uring", verdict="ok", found=f"io_uring_disabled {state}; engines here don't use it")


def _amx() -> Check:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace") if platform.machine() == "x86_64" else ""
    found = "asked for again after a restore" if "amx_tile" in flags else "this processor has none"
    return Check(name="amx", verdict="ok", found=found)


def _ladder(lines: list[Check]) -> Check:
    hindered = [line for line in lines if line.verdict != "ok" and line.name != "namespaces"]
    if hindered or os.geteuid() != 0:
        why = ", ".join(line.name for line in hindered) or "it needs root"
        return Check(
            name="ladder", verdict="note", found=f"up, sleep, cold; not saved ({why}); not checkpoint (no CUDA is used)",
            cure=hindered[0].cure if hindered else "Run as root for saved images.",
        )  # fmt: skip
    return Check(name="ladder", verdict="ok", found="up, sleep, saved, cold; not checkpoint (no CUDA is used)")
