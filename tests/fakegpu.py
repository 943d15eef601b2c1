"""A GPU made of host memory: blocks are memory files, exported as descriptors, for tests to read what a copy has brought."""

import ctypes
import mmap
import os
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from pool.gpu import Activity, Block, NoDeviceMemory
from pool.mapping import map_shared, unmap

MIB = 1 << 20


@dataclass
class FakeGpu:
    total_bytes: int = 256 * MIB
    uuid: str = "GPU-fake"
    granularity: int = 2 * MIB
    foreign_bytes: int = 0
    """Used by somebody whom the pool does not know."""
    computing: Set[int] | None = frozenset()
    """As in `Activity`."""
    roomless: bool = False
    """No ring fits, although there was room when it was asked for."""
    relayed: list[tuple[int, int]] = field(default_factory=list)
    """Through this device's ring: offset and size, in the order in which they left."""
    failing: bool = False
    """Copies fail."""
    broken: bool = False
    """The second hop fails."""
    pinnable: bool = True
    steals_after: int | None = None
    """Somebody takes all the rest once so many blocks have been made."""
    registered: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """`wait` returns once it is set: bytes travel until then."""
    threads: set[int] = field(default_factory=set)
    writers: dict[int, set[str]] = field(default_factory=dict)
    """Block -> devices that relay into it."""
    ring_gate: threading.Event = field(default_factory=threading.Event)
    """A ring takes its next piece once it is set."""
    taken: int = 0
    """Pieces that rings of this device have begun."""
    rings: int = 0
    most_ring_bytes: int = 0
    _queue: list[tuple[Block, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()
        self.ring_gate.set()

    def bind(self) -> None:
        self.threads.add(threading.get_ident())

    def free_bytes(self) -> int:
        return self.total_bytes - self.foreign_bytes - sum(block.size for block in self.blocks.values())

    def users(self) -> dict[int, int]:
        return {4711: self.foreign_bytes} if self.foreign_bytes else {}

    def activity(self) -> Activity | None:
        return Activity(self.free_bytes(), self.computing)

    def create(self, size: int, writers: Sequence[str] = ()) -> Block:
        if self.steals_after is not None and len(self.blocks) >= self.steals_after:
            self.foreign_bytes += self.free_bytes()
        if size > self.free_bytes():
            raise NoDeviceMemory(f"{size} bytes")
        fd = os.memfd_create("block", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return self.made(fd, size, writers)

    def made(self, fd: int, size: int, writers: Sequence[str]) -> Block:
        block = Block(map_shared(os.dup(fd), size), size, fd)
        self.blocks[fd] = block
        self.writers[fd] = set(writers)
        return block

    def export(self, block: Block) -> int:
        return os.dup(block.handle)

    def destroy(self, block: Block) -> None:
        del self.blocks[block.handle]
        del self.writers[block.handle]
        unmap(block.address, block.size)
        os.close(block.handle)

    def register(self, address: int, size: int) -> None:
        if not self.pinnable:
            raise OSError(801, "not supported")
        assert address not in self.registered, "registered twice"
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def copy(self, block: Block, offset: int, address: int, size: int) -> None:
        self._queue.append((block, offset, address, size))

    @property
    def queued_bytes(self) -> int:
        """On their way over this device's own link."""
        return sum(size for _, _, _, size in self._queue)

    def wait(self) -> None:
        assert self.gate.wait(20)
        if self.failing and self._queue:
            self._queue.clear()
            raise OSError(700, "a copy failed")
        for block, offset, address, size in self._queue:
            if block.handle in self.blocks:
                ctypes.memmove(block.address + offset, address, size)
                self.copies.append(size)
        self._queue.clear()

    def relay(self, buffers: int, size: int) -> "FakeRelay":
        if self.roomless:
            raise NoDeviceMemory(f"{buffers * size} bytes")
        self.rings += 1
        self.most_ring_bytes = max(self.most_ring_bytes, buffers * size)
        return FakeRelay(self, size)


class FakeRelay:
    def __init__(self, gpu: FakeGpu, size: int) -> None:
        self._gpu, self._size = gpu, size
        self._queue: list[tuple[Block, int, int, int]] = []

    def send(self, block: Block, offset: int, address: int, size: int) -> None:
        assert size <= self._size, "larger than a buffer"
        self._gpu.taken += 1
        assert self._gpu.ring_gate.wait(20)
        self._queue.append((block, offset, address, size))

    def wait(self) -> None:
        assert self._gpu.gate.wait(20)
        for block, offset, address, size in self._queue:
            if self._gpu.broken:
                raise OSError(700, "the second hop failed")
            ctypes.memmove(block.address + offset, address, size)
            self._gpu.relayed.append((offset, size))
        self._queue.clear()

    def close(self) -> None:
        self._gpu.rings -= 1


def read(fd: int, offset: int, size: int) -> bytes:
    with mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        return mapped[offset : offset + size]
