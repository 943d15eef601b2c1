"""Where the locks of GPUs' cells lie: a GPU is one for all planes of a machine, so its locks are, too.

A directory that everybody may write (sticky, as /tmp) below the machine's own for locks. Where it can't be made or used, a
plane falls back on one of its user: then only planes of one user keep off each other's cells, and `doctor` says so.
"""

import os
import stat
from pathlib import Path
from typing import Final

ROOT: Final = Path("/run/lock")
NAME: Final = "enginehouse"
_MODE: Final = 0o1777


def place(root: Path = ROOT) -> tuple[Path, str]:
    """The directory, made if it was not there, and what a person should know of it (empty: it is where it should be)."""
    wanted = root / NAME
    try:
        wanted.mkdir(mode=0o700, exist_ok=True)
        status = wanted.lstat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != _MODE:
            wanted.chmod(_MODE)
            status = wanted.lstat()
        if not stat.S_ISDIR(status.st_mode) or not os.access(wanted, os.W_OK | os.X_OK):
            raise PermissionError(13, "it is no directory that others may use")
    except OSError as error:
        return _own(), f"{wanted} can't be used ({error.strerror}): planes of other users are not kept off this one's GPUs"
    return wanted, ""


def _own() -> Path:
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache")
    own = base / f"{NAME}-locks"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return own
