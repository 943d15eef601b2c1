"""The data directory: where it is, who may read it, who holds it, and the secrets and device UUIDs that it keeps."""

import contextlib
import fcntl
import os
import secrets
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from compose.process import Identity
from compose.refusal import EnvironmentRefusal
from controlplane.plane import Plane
from controlplane.quantities import human_bytes

SOCKET_LIMIT: Final = 107
"""Bytes of a unix socket's path on Linux, without the final zero."""
LONGEST_SOCKET: Final = "/run/inst/ins_01ARZ3NDEKTSV4RRFFQ69G5FAV_99/control.sock"
"""Below the data directory, the longest path that becomes a socket."""
ROOM_BYTES: Final = 1 << 30
"""Least free space to start with; Postgres and NATS stop working on a full disk."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a data directory."""

    process: Identity
    since_ms: int

    @property
    def since(self) -> str:
        return datetime.fromtimestamp(self.since_ms / 1000, UTC).astimezone().isoformat(" ", "seconds")


def default() -> Path:
    """Return `$ENGINEHOUSE_DATA`, else /var/lib/enginehouse/plane for root, else enginehouse in the user's data home."""
    if named := os.environ.get("ENGINEHOUSE_DATA"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/enginehouse/plane")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "enginehouse"


class Directory:
    """An open data directory. Holds its lock from `open` to `close`; the lock goes with the process, however it ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @staticmethod
    def open(path: Path) -> "Directory":
        """Make the directory (0700) if need be and lock it. Raises EnvironmentRefusal."""
        path = Path(os.path.abspath(path.expanduser()))
        room = SOCKET_LIMIT - len(LONGEST_SOCKET)
        if len(os.fsencode(path)) > room:
            raise EnvironmentRefusal(
                "path_too_long", f"{path} has {len(os.fsencode(path))} bytes; sockets below it leave room for {room}.",
                "Choose a shorter data directory with --data.",
            )  # fmt: skip
        _make(path)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            held = holder(path)
            who = f"pid {held.process.pid} since {held.since}" if held else "a process that has not said who it is"
            raise EnvironmentRefusal(
                "held", f"Another up holds {path}: {who}.",
                f"End it with `enginehouse down --data {path}`, or choose another directory with --data.",
            ) from None  # fmt: skip
        me = Identity.of(os.getpid())
        assert me is not None
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(Holder(process=me, since_ms=time.time_ns() // 1_000_000)), 0)
        for folder in ("secrets", "logs", "run"):
            (path / folder).mkdir(mode=0o700, exist_ok=True)
        return Directory(path, lock)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def secret(self, name: str) -> str:
        """Return the secret of that name, made (256 bits, 0600) when it is first asked for."""
        path = self.path / "secrets" / name
        with contextlib.suppress(FileNotFoundError):
            if kept := path.read_text().strip():  # an empty one, which a crash may have left, anybody could guess
                return kept
        fresh = secrets.token_urlsafe(32)
        self.keep_secret(name, fresh)
        return fresh

    def keep_secret(self, name: str, value: str) -> Path:
        path = self.path / "secrets" / name
        _replace(path, value.encode() + b"\n")
        return path

    def device_uuid(self, name: str) -> str:
        """Return the UUID of the declared device of that name: the same for ever in this directory."""
        path = self.path / "devices.json"
        try:
            known = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            known = {}
        if name not in known:
            known[name] = str(uuid.uuid4())
            _replace(path, msgspec.json.format(msgspec.json.encode(known)) + b"\n")
        return known[name]


def holder(path: Path) -> Holder | None:
    """Who holds the directory now; None when nobody does, or has not written its name yet. Raises EnvironmentRefusal."""
    try:
        held = msgspec.json.decode((path / "lock").read_bytes(), type=Holder)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
    except PermissionError as error:
        raise unreadable(path) from error
    return held if held.process.alive else None


def _replace(path: Path, content: bytes) -> None:
    """Write a file (0600) whole or not at all, also when the machine loses its power meanwhile."""
    fresh = path.with_name(f"{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    fresh.replace(path)


def plane_of(path: Path) -> Plane:
    """The plane that was last started in the directory. Raises EnvironmentRefusal."""
    try:
        return Plane.read(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise EnvironmentRefusal(
            "no_plane", f"No plane was ever started in {path}.",
            "Start one with `enginehouse up`, or name another with --data or ENGINEHOUSE_URL.",
        ) from error  # fmt: skip
    except PermissionError as error:
        raise unreadable(path) from error


def unreadable(path: Path) -> EnvironmentRefusal:
    return EnvironmentRefusal(
        "directory",
        f"{path} may not be read by user {os.geteuid()}.",
        "Run as the user whose plane it is, or name another with --data.",
    )


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.stat()
        strange = bool(status.st_mode & 0o077) and not (path / "lock").exists() and any(path.iterdir())
    except OSError as error:
        raise EnvironmentRefusal(
            "directory", f"{path} can't be made: {error.strerror}.", "Choose another data directory with --data."
        ) from error
    if status.st_uid != os.geteuid():
        raise EnvironmentRefusal(
            "directory", f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}.",
            "Run as that user, or choose another data directory with --data.",
        )  # fmt: skip
    if strange:  # a home, /tmp: to make it private would lock others out
        raise EnvironmentRefusal(
            "directory", f"{path} is open to others and holds files that are no plane's.",
            "Choose a new or empty data directory with --data.",
        )  # fmt: skip
    path.chmod(0o700)
    disk = os.statvfs(path)
    if (free := disk.f_bavail * disk.f_frsize) < ROOM_BYTES:
        raise EnvironmentRefusal(
            "disk_full", f"{path} has {human_bytes(free)} free; the least is {human_bytes(ROOM_BYTES)}.",
            "Make room there, or choose another data directory with --data.",
        )  # fmt: skip
