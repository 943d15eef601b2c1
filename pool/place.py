"""Where a data directory's segments live, and that no other's stay behind once their data directory is gone."""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the point; the directory in it is ours alone, see `_own`
LOCK = "pool.lock"
"""File in a data directory: held by its daemon, whose pid it has."""
OWNER = "owner"
"""File in a place: the data directory's path; locked while its daemon lives."""


class PlaceRefused(Exception):
    """The place for the segments is not usable; the message says why and what to do."""


def place(directory: Path, budget_bytes: int, *, shared_memory: Path | None = SHARED_MEMORY) -> Path:
    """Where the segments of this data directory live: where they were, else shared memory if the budget fits, else on disk.

    Makes it. Raises PlaceRefused if it belongs to somebody else.
    """
    on_disk = directory / "segments"
    if shared_memory is None or (on_disk.is_dir() and any(on_disk.iterdir())):
        return _own(on_disk)
    shared = shared_memory / f"{_prefix()}{digest(directory)}"
    if shared.exists() or (shared_memory.is_dir() and free_bytes(shared_memory) >= budget_bytes):
        return _own(shared)
    return _own(on_disk)


def digest(directory: Path) -> str:
    """With which the name of this data directory's place in shared memory ends, whoever's it is."""
    return blake3(os.fsencode(directory.resolve())).hexdigest()[:12]


def _prefix() -> str:
    return f"enginehouse-{os.geteuid()}-"


def _own(root: Path) -> Path:
    root.mkdir(mode=0o700, exist_ok=True)
    state = root.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise PlaceRefused(f"{root} is not a directory of user {os.geteuid()} with mode 0700: remove it")
    return root


def free_bytes(path: Path) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


@contextlib.contextmanager
def claim(root: Path, directory: Path) -> Iterator[None]:
    """Say for whom the place is, for as long as the daemon lives; a place without any set goes with it."""
    fd = os.open(root / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.ftruncate(fd, 0)
        os.pwrite(fd, os.fsencode(directory.resolve()), 0)
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):  # or somebody has removed it, or does so just now
            if {path.name for path in root.iterdir()} <= {OWNER}:
                shutil.rmtree(root)
        os.close(fd)


def sweep(shared_memory: Path = SHARED_MEMORY) -> list[str]:
    """Remove this user's places whose data directory is gone; their names. What engines still map stays good for them."""
    removed = []
    for path in _abandoned(shared_memory):
        shutil.rmtree(path, ignore_errors=True)  # another daemon that starts may remove it, too
        removed.append(path.name)
    return removed


def abandoned(shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """This user's places whose data directory is gone, and whose daemon is."""
    return list(_abandoned(shared_memory))


def _abandoned(shared_memory: Path) -> Iterator[Path]:
    """Each is locked until the next is asked for."""
    for path in sorted(shared_memory.glob(_prefix() + "*")):
        try:
            _own(path)
            with (path / OWNER).open("rb") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                whose = owner.read()
                if whose and not os.path.lexists(os.fsdecode(whose)):  # empty: its daemon is just about to lock it
                    yield path
        except (PlaceRefused, BlockingIOError, FileNotFoundError):  # not ours; its daemon lives; just being made or removed
            continue
