"""One OS lock per cell: the last of the four layers that keep two instances off one cell.

The worker opens and locks the files and hands the descriptors on to the instance's holder. A lock belongs to the
open file description, so it lives as long as the holder keeps its copy, whatever happens to the worker.
Each file also remembers the highest grant that ever took its cell: an older one is fenced off.
"""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """Written into a lock's file by whoever took it last."""

    grant: int
    instance: str


class CellConflict(Exception):
    """A cell is locked by a living process, or was taken under a newer grant.

    Attributes: `code` is `cell_locked` or `cell_fenced`; `claim` names the holder if its file does.
    """

    def __init__(self, code: str, message: str, claim: Claim | None) -> None:
        super().__init__(message)
        self.code, self.claim = code, claim


class Cells:
    """Locked cells in this process, until they are handed on or closed."""

    def __init__(self, device: str, numbers: tuple[int, ...], descriptors: tuple[int, ...]) -> None:
        self.device, self.numbers, self.descriptors = device, numbers, descriptors

    def close(self) -> None:
        """Close our copies; a lock that no other process shares is given up."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


class Locks:
    """The lock files of a node, `DIR/run/locks/<device>.<cell>`. They are never removed: a removed file can be locked twice."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def take(self, device: str, numbers: Sequence[int], *, grant: int, instance: str) -> Cells:
        """Lock cells for a grant: all of them or none. Raises CellConflict, which names who has one."""
        taken: list[int] = []
        try:
            for number in numbers:
                taken.append(self._take(device, number, Claim(grant, instance)))
        except BaseException:
            for descriptor in taken:
                os.close(descriptor)
            raise
        return Cells(device, tuple(numbers), tuple(taken))

    def holder(self, device: str, number: int) -> Claim | None:
        """Who holds a cell; None when it is free. Advisory: it may change as soon as this has returned."""
        descriptor = self._open(device, number)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _claim(descriptor) or Claim(0, "")
        finally:
            os.close(descriptor)
        return None

    def _open(self, device: str, number: int) -> int:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{device}.{number}"
        if os.sep in name or name.startswith("."):
            raise ValueError(f"{device!r} is no device")
        return os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _take(self, device: str, number: int, claim: Claim) -> int:
        descriptor = self._open(device, number)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = _claim(descriptor)
                who = f"instance {other.instance} under grant {other.grant}" if other else "another process"
                raise CellConflict(
                    "cell_locked",
                    f"cell {number} of device {device} is locked by {who}; grant {claim.grant} can't have it yet",
                    other,
                ) from None
            last = _claim(descriptor)
            if last is not None and last.grant > claim.grant:
                raise CellConflict(
                    "cell_fenced",
                    f"cell {number} of device {device} was last taken under grant {last.grant}, newer than {claim.grant}",
                    last,
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(claim), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _claim(descriptor: int) -> Claim | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Claim)
    except msgspec.DecodeError:
        return None  # never taken, or its taker died before it wrote its name
