"""What all instances of one worker share: the node's place, locks, sources, pool, deadlines and the board of progress."""

import time
from pathlib import Path

from msgspec import Struct

from controlplane.plane import Plane
from worker.board import Board
from worker.caller import Caller
from worker.deadlines import DEFAULT, Deadlines
from worker.devicebooks import DeviceBooks
from worker.images.cabinet import Cabinet
from worker.locks import Locks
from worker.spare import Spare
from worker.stock import Stock


class Site(Struct, frozen=True, kw_only=True):
    """One worker's surroundings."""

    plane: Plane
    caller: Caller
    locks: Locks
    stock: Stock
    board: Board
    images: Cabinet
    books: DeviceBooks
    deadlines: Deadlines = DEFAULT
    spare: Spare | None = None

    @property
    def data(self) -> Path:
        return Path(self.plane.data)

    @property
    def instances(self) -> Path:
        return self.data / "run" / "inst"

    def size_of(self, device: str) -> int:
        """Bytes of a device of this node; 0: it is not declared any more."""
        return next((known.size_bytes for known in self.plane.devices if known.device == device), 0)

    def is_gpu(self, device: str | None) -> bool:
        return any(known.device == device and known.kind == "gpu" for known in self.plane.devices)


def now_ms() -> int:
    """Unix milliseconds."""
    return time.time_ns() // 1_000_000
