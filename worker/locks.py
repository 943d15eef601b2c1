"""One OS lock per cell: the last of the four layers that keep two instances off one cell.

The worker opens and locks the files and hands the descriptors on to the instance's holder. A lock belongs to the
open file description, so it lives as long as the holder keeps its copy, whatever happens to the worker.
Each file also remembers the highest grant that ever took its cell: an older one of the same plane is fenced off.
"""

import fcntl
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from controlplane.plane import Plane
from worker import gpulocks


class Claim(msgspec.Struct, frozen=True):
    """Written into a lock's file by whoever took it last."""

    grant: int
    instance: str
    plane: str = ""
    """Whose grant: numbers of two planes don't compare."""


class CellConflict(Exception):
    """A cell is locked by a living process, or was taken under a newer grant.

    Attributes: `code` is `cell_locked` or `cell_fenced`; `claim` names the holder if its file does.
    """

    def __init__(self, code: str, message: str, claim: Claim | None) -> None:
        super().__init__(message)
        self.code, self.claim = code, claim


class Share(msgspec.Struct, frozen=True):
    """Cells of one device, and the grant that they are taken under."""

    device: str
    numbers: tuple[int, ...]
    grant: int


class Cells:
    """Locked cells in this process, of one device or (a gang's) of several, until they are handed on or closed."""

    def __init__(self, shares: tuple[Share, ...], descriptors: tuple[int, ...]) -> None:
        self.shares, self.descriptors = shares, descriptors

    def close(self) -> None:
        """Close our copies; a lock that no other process shares is given up."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()


class Locks:
    """The lock files of a node, `DIR/run/locks/<device>.<cell>`; those of GPUs lie in a directory of the whole machine.

    They are never removed: a removed file can be locked twice.
    """

    def __init__(self, directory: Path, *, plane: str = "", gpus: Collection[str] = (), of_machine: Path | None = None) -> None:
        self._directory, self._plane, self._gpus = directory, plane, frozenset(gpus)
        self._of_machine = of_machine or directory

    @staticmethod
    def of(plane: Plane) -> "Locks":
        """Those of a plane's node."""
        directory = Path(plane.data) / "run" / "locks"
        gpus = {known.device for known in plane.devices if known.kind == "gpu"}
        name = blake3(f"{plane.data} {plane.node_token}".encode()).hexdigest(length=8)
        return Locks(directory, plane=name, gpus=gpus, of_machine=gpulocks.place()[0] if gpus else None)

    def take(self, shares: Sequence[Share], *, instance: str) -> Cells:
        """Lock cells of all shares or none, in order of device. Raises CellConflict, which names who has one."""
        taken: list[int] = []
        try:
            for share in sorted(shares, key=lambda share: share.device):
                for number in share.numbers:
                    taken.append(self._take(share.device, number, Claim(share.grant, instance, self._plane)))
        except BaseException:
            for descriptor in taken:
                os.close(descriptor)
            raise
        return Cells(tuple(shares), tuple(taken))

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
        name = f"{device}.{number}"
        if os.sep in name or name.startswith("."):
            raise ValueError(f"{device!r} is no device")
        if device in self._gpus:
            return _open_shared(self._of_machine / name)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _take(self, device: str, number: int, claim: Claim) -> int:
        descriptor = self._open(device, number)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = _claim(descriptor)
                of = "" if other is None or other.plane == self._plane else " of another plane on this machine"
                who = f"instance {other.instance} under grant {other.grant}{of}" if other else "another process"
                raise CellConflict(
                    "cell_locked",
                    f"cell {number} of device {device} is locked by {who}; grant {claim.grant} can't have it yet",
                    other,
                ) from None
            last = _claim(descriptor)
            if last is not None and last.plane == claim.plane and last.grant > claim.grant:
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


def _open_shared(path: Path) -> int:
    """A file that every user of the machine may lock. In a sticky directory the kernel lets nobody O_CREAT another's file."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(path, flags)  # made by another in this very moment
    os.fchmod(descriptor, 0o666)
    return descriptor


def _claim(descriptor: int) -> Claim | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Claim)
    except msgspec.DecodeError:
        return None  # never taken, or its taker died before it wrote its name
