"""The record of a request in flight: one append-only file, from which a frontend that comes back after `kill -9` goes on.

Nothing is synced to the disk: what must survive is the frontend's death, and after the machine's the engine is gone, too.
The text is not stored. It follows from the ids, the same every time, and so do all counts of characters.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from worker.engines.messages import Sampling
from worker.engines.wire import BrokenStream, Frames, decoder, pack
from worker.failure import FULL

NAME: Final = re.compile(r"[A-Za-z0-9_]{1,100}")


log = structlog.get_logger("frontend")


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame: everything that the request is."""

    request: str
    attempt: int
    model: str
    grant: int
    source: str
    """Directory of the tokenizer that its ids belong to."""
    prompt: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its name at the engine and in the directory: another attempt of a request is another one."""
        return f"{self.request}_{self.attempt}"


class Recorded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Output ids, following those before."""

    ids: tuple[int, ...]


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Its end: a finish reason (`stop`, `length`), or an error's code and message."""

    reason: str
    error: bool = False
    message: str = ""


Frame = Opened | Recorded | Closed


class Record:
    """The file of one request, open for appending."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd

    @staticmethod
    def create(directory: Path, opened: Opened) -> "Record":
        """Begin a request's record. Raises FileExistsError, or ValueError for an id that is no name."""
        if not NAME.fullmatch(opened.request):
            raise ValueError(f"{opened.request!r} is no request id")
        path = directory / opened.key
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in FULL:
                raise
            log.error("record_given_up", request=opened.key, reason=str(error))
            return Record(path, -1)
        record = Record(path, fd)
        record.append(opened)
        return record

    def append(self, frame: Frame) -> None:
        """Add a frame. A disk that is full costs the record, not the request: it goes on, and would not survive our death."""
        if self._fd < 0:
            return
        data = pack(frame)
        try:
            if os.write(self._fd, data) == len(data):
                return
            reason = "No space left on device"
        except OSError as error:
            reason = str(error)
        log.error("record_given_up", request=self._path.name, reason=reason)
        self.remove()  # half a record would be worse than none

    def remove(self) -> None:
        """The request is over and its reader has it all."""
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Replayed(msgspec.Struct, frozen=True):
    """What a file says: how its request began, its ids, its end if it had one."""

    opened: Opened
    ids: tuple[int, ...]
    closed: Closed | None


def replay(directory: Path) -> Iterator[tuple[Record, Replayed]]:
    """Yield every request that was in flight, its file open again. A frame cut short by a death is cut off."""
    for path in sorted(directory.iterdir()):
        found, whole = _read(path)
        if found is None:
            path.unlink()  # died before its first frame: the request was never answered, nor submitted
            continue
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(fd, whole)
        yield Record(path, fd), found


def _read(path: Path) -> tuple[Replayed | None, int]:
    """Return what the file's whole frames say, and their length in bytes."""
    frames: list[Any] = []
    whole = 0
    decode = decoder(Frame).decode
    try:
        for body in Frames().feed(path.read_bytes()):
            frames.append(decode(body))
            whole += 4 + len(body)
    except (BrokenStream, msgspec.MsgspecError):
        pass  # what follows a broken frame was never acknowledged to the engine: it comes again
    if not frames or not isinstance(frames[0], Opened):
        return None, 0
    ids = tuple(token for frame in frames if isinstance(frame, Recorded) for token in frame.ids)
    return Replayed(frames[0], ids, next((frame for frame in frames if isinstance(frame, Closed)), None)), whole
