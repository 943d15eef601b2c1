"""What the pool asks of a GPU: memory that can be exported, copies from host memory, bytes relayed to a neighbour.

Nothing else, so that it can be played without one (`tests/fakegpu.py`).
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol


class NoDeviceMemory(Exception):
    """The device has less than was asked for, although it had enough when asked a moment ago: somebody else took it."""


@dataclass(frozen=True)
class Block:
    """Physical memory of one segment or several, mapped in the daemon."""

    address: int
    size: int
    handle: int


@dataclass(frozen=True)
class Activity:
    """What a device is used for at the moment."""

    free_bytes: int
    computing: Set[int] | None = frozenset()
    """Processes other than this one that computed there in the last second; None: some may have, the driver does not tell."""

    @property
    def anybody(self) -> bool:
        """May be computing there."""
        return self.computing is None or bool(self.computing)


class Relay(Protocol):
    """A ring of buffers on a device that helps: host memory -> ring -> another device's block. All calls from one thread."""

    def send(self, block: Block, offset: int, address: int, size: int) -> None:
        """Queue both hops of at most a buffer's bytes, once a buffer is free. Raises OSError."""

    def wait(self) -> None:
        """For all that was sent. Raises OSError."""

    def close(self) -> None:
        """After `wait`: the ring's memory is free."""


class Gpu(Protocol):
    """One device. All calls but `relay`, `users` and `activity` come from one thread, its lane's."""

    uuid: str
    total_bytes: int
    granularity: int
    """Sizes of blocks are multiples of it."""

    def bind(self) -> None:
        """Make this thread the one that talks to the device."""

    def free_bytes(self) -> int:
        """By the driver's word, whoever uses the rest."""

    def users(self) -> Mapping[int, int]:
        """Process id -> bytes, as far as the driver tells."""

    def activity(self) -> Activity | None:
        """For any thread; None: the driver does not tell."""

    def create(self, size: int, writers: Sequence[str] = ()) -> Block:
        """`writers`: devices that relay into it. Raises NoDeviceMemory."""

    def export(self, block: Block) -> int:
        """A descriptor, the caller's to close."""

    def destroy(self, block: Block) -> None:
        """Once nobody else has it imported the memory is free."""

    def register(self, address: int, size: int) -> None:
        """Pin host memory that has been touched. Raises OSError: then copies from it are slow, not wrong."""

    def unregister(self, address: int) -> None: ...

    def copy(self, block: Block, offset: int, address: int, size: int) -> None:
        """Queue a copy from host memory that lies within one registered range (or in none)."""

    def wait(self) -> None:
        """For all that was queued. Raises OSError."""

    def relay(self, buffers: int, size: int) -> Relay:
        """A ring on this device, for the calling thread. Raises NoDeviceMemory, OSError."""
