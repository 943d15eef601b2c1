"""A GPU's memory that is only kept account of: who has taken how much of it, across processes, as a driver would know.

Each taker has a file with its bytes and keeps it locked, so what a dead one had is free. Whose file it is, is found by who has
it open: a process in a pid namespace of its own does not know the number by which others know it.
"""

import contextlib
import fcntl
import json
import os
import stat
from pathlib import Path


class DeviceFull(Exception):
    pass


class Room:
    """All devices of one pretended machine; `where` is its directory."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.devices: dict[str, int] = json.loads((where / "devices.json").read_text())

    def used(self, uuid: str) -> int:
        return sum(map(_size, self._living(uuid)))

    def free(self, uuid: str) -> int:
        return self.devices[uuid] - self.used(uuid)

    def processes(self, uuid: str) -> dict[int, int]:
        """Pid -> bytes, as seen from the caller's pid namespace."""
        found: dict[int, int] = {}
        living = {str(path) for path in self._living(uuid)}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                for descriptor in os.scandir(entry / "fd"):
                    if (target := taken(descriptor.path)) in living:
                        found[int(entry.name)] = found.get(int(entry.name), 0) + _size(Path(target))
        return found

    def _living(self, uuid: str) -> list[Path]:
        return [path for path in (self.where / uuid).iterdir() if _held(path)]


class Taker:
    """One process's part of a device. Its end, however it comes, gives it back."""

    def __init__(self, room: Room, uuid: str) -> None:
        self._room, self._uuid, self.size = room, uuid, 0
        path = room.where / uuid / os.urandom(8).hex()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def take(self, size: int) -> None:
        """Raises DeviceFull."""
        with (self._room.where / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if size > self._room.free(self._uuid):
                raise DeviceFull(f"{size} bytes of {self._uuid}, {self._room.free(self._uuid)} are free")
            self._write(self.size + size)

    def give(self, size: int) -> None:
        assert size <= self.size
        self._write(self.size - size)

    def moved(self, uuid: str) -> None:
        """Its file is with another device now."""
        self._uuid = uuid

    def _write(self, size: int) -> None:
        self.size = size
        os.pwrite(self._fd, f"{size:<20}".encode(), 0)


def taken(descriptor: str) -> str:
    """The file of account that a descriptor (its path in /proc) is a taker's of. Whoever looks on has one for a moment, too,
    but only to read; then, or when it is closed meanwhile, nothing."""
    try:
        return os.readlink(descriptor) if os.lstat(descriptor).st_mode & stat.S_IWUSR else ""
    except OSError:
        return ""


def _size(path: Path) -> int:
    """0: it is with another device now, or its taker has ended."""
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


def _held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
