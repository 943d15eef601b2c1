"""What the pool asks of a GPU: memory that can be exported, copies from host memory, free bytes.

Nothing else, so that it can be played without one (`tests/fakegpu.py`).
"""

from dataclasses import dataclass
from typing import Protocol


class NoDeviceMemory(Exception):
    """The device has less than was asked for, although it had enough when asked a moment ago: somebody else took it."""


@dataclass(frozen=True)
class Block:
    """Physical memory of one segment, mapped in the daemon."""

    address: int
    size: int
    handle: int


class Gpu(Protocol):
    """One device. All calls come from one thread, its lane's."""

    uuid: str
    total_bytes: int
    granularity: int
    """Sizes of blocks are multiples of it."""

    def bind(self) -> None:
        """Make this thread the one that talks to the device."""

    def free_bytes(self) -> int:
        """By the driver's word, whoever uses the rest."""

    def create(self, size: int) -> Block:
        """Raises NoDeviceMemory."""

    def export(self, block: Block) -> int:
        """A descriptor, the caller's to close."""

    def destroy(self, block: Block) -> None:
        """Once nobody else has it imported the memory is free."""

    def register(self, address: int, size: int) -> None:
        """Pin host memory that has been touched. Raises OSError: then copies from it are slow, not wrong."""

    def unregister(self, address: int) -> None: ...

    def copy(self, block: Block, address: int) -> None:
        """Queue a copy of the block's size from host memory."""

    def wait(self) -> None:
        """For all that was queued. Raises OSError."""
