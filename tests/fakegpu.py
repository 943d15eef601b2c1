"""A GPU made of host memory: blocks are memory files, exported as descriptors, for tests to read what a copy has brought."""

import ctypes
import mmap
import os
import threading
from dataclasses import dataclass, field

from pool.gpu import Block, NoDeviceMemory
from pool.mapping import map_shared, unmap

MIB = 1 << 20


@dataclass
class FakeGpu:
    total_bytes: int = 256 * MIB
    uuid: str = "GPU-fake"
    granularity: int = 2 * MIB
    foreign_bytes: int = 0
    """Used by somebody whom the pool does not know."""
    pinnable: bool = True
    steals_after: int | None = None
    """Somebody takes all the rest once so many blocks have been made."""
    registered: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """`wait` returns once it is set: bytes travel until then."""
    threads: set[int] = field(default_factory=set)
    _queue: list[tuple[Block, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def bind(self) -> None:
        self.threads.add(threading.get_ident())

    def free_bytes(self) -> int:
        return self.total_bytes - self.foreign_bytes - sum(block.size for block in self.blocks.values())

    def create(self, size: int) -> Block:
        if self.steals_after is not None and len(self.blocks) >= self.steals_after:
            self.foreign_bytes += self.free_bytes()
        if size > self.free_bytes():
            raise NoDeviceMemory(f"{size} bytes")
        fd = os.memfd_create("block", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        block = Block(map_shared(os.dup(fd), size), size, fd)
        self.blocks[fd] = block
        return block

    def export(self, block: Block) -> int:
        return os.dup(block.handle)

    def destroy(self, block: Block) -> None:
        del self.blocks[block.handle]
        unmap(block.address, block.size)
        os.close(block.handle)

    def register(self, address: int, size: int) -> None:
        if not self.pinnable:
            raise OSError(801, "not supported")
        assert address not in self.registered, "registered twice"
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def copy(self, block: Block, address: int) -> None:
        self._queue.append((block, address))

    def wait(self) -> None:
        assert self.gate.wait(20)
        for block, address in self._queue:
            if block.handle in self.blocks:
                ctypes.memmove(block.address, address, block.size)
                self.copies.append(block.size)
        self._queue.clear()


def read(fd: int, offset: int, size: int) -> bytes:
    with mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        return mapped[offset : offset + size]
