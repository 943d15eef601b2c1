"""Directories of test runs that were interrupted, or kept for their logs: a later run removes them.

Their names have the pid of the run that made them, which is gone by then; none of their processes is left.
"""

import contextlib
import functools
import os
import secrets
import shutil
import stat
import time
from pathlib import Path
from typing import Final

from compose.embedded.cluster import Cluster
from compose.remains import belonging
from tests.poolroom import forget

PLACE: Final = Path("/tmp")
"""Right under it: other accounts must reach them, and a socket's path has 107 bytes at most."""
ABANDONED_S: Final = 3600.0
"""No run lasts longer: one whose pid we can't see, in a container of its own, is safe as well."""
KEPT_S: Final = 86_400.0
KEPT: Final = "kept"
"""File in a directory: somebody may want to read its logs."""


def directory(mode: int = 0o700) -> Path:
    """A new, empty one of this run's."""
    sweep_once()
    made = PLACE / f"eh-{os.getpid()}-{secrets.token_hex(4)}"
    made.mkdir(mode=mode)
    made.chmod(mode)
    return made


@functools.cache
def sweep_once() -> None:
    sweep(PLACE)


def keep(path: Path) -> None:
    """For a day."""
    with contextlib.suppress(OSError):  # its disk may be full
        (path / KEPT).touch()


def sweep(place: Path) -> list[Path]:
    """Remove what earlier runs have left; returns it. What can't be looked at or removed stays."""
    removed = []
    for path in sorted(place.glob("eh-*-????????")):
        with contextlib.suppress(OSError, ValueError):
            if _abandoned(path):
                remove(path)
                removed.append(path)
    return removed


def remove(path: Path) -> None:
    """With all that a plane in it has elsewhere. Its processes must have ended."""
    forget(path / "run" / "pool")
    with contextlib.suppress(Exception):
        Cluster.of(path).remove()
    shutil.rmtree(path, ignore_errors=True)


def _abandoned(path: Path) -> bool:
    state = path.lstat()
    if not stat.S_ISDIR(state.st_mode) or os.geteuid() not in {0, state.st_uid}:
        return False
    if time.time() - state.st_mtime < (KEPT_S if (path / KEPT).exists() else ABANDONED_S):
        return False
    return not _lives(int(path.name.split("-")[1])) and not os.path.ismount(path) and not belonging(path)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
