"""The daemon's own view of its segments, from which devices are filled: mapped once, pinned piece by piece in spare time."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from pool.gpu import Gpu
from pool.mapping import map_shared, unmap


@dataclass
class Slab:
    """One segment. `registered` belongs to the lane's thread."""

    address: int
    size: int
    registered: bool = False
    refused: bool = False
    """The driver does not pin it: copies from it go through the driver's own buffers."""

    def register(self, gpu: Gpu) -> None:
        """Once; a refusal costs speed only. The pages have been touched: else pinning runs at a tenth of the speed."""
        if self.registered or self.refused:
            return
        try:
            gpu.register(self.address, self.size)
        except OSError:
            self.refused = True
        else:
            self.registered = True


@dataclass
class Slabs:
    """Of one set, those that go to devices."""

    weight_set: str
    parts: list[Slab] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def registered_bytes(self) -> int:
        return sum(part.size for part in self.parts if part.registered)

    def map(self, fds: Sequence[int], sizes: Sequence[int]) -> None:
        """Raises OSError; nothing is mapped then."""
        try:
            for fd, size in zip(fds, sizes, strict=True):
                self.parts.append(Slab(map_shared(_writable(fd), size), size))
        except OSError:
            self.unmap()
            raise

    def unregister(self, gpu: Gpu) -> None:
        for part in self.parts:
            if part.registered:
                part.registered = False
                gpu.unregister(part.address)

    def unmap(self) -> None:
        for part in self.parts:
            unmap(part.address, part.size)
        self.parts.clear()


def _writable(fd: int) -> int:
    """A writable descriptor of a sealed segment, left to `map_shared` to close: the driver pins writable mappings only.

    Sealing keeps engines out, which are handed read-only descriptors; the daemon itself never writes through this one.
    """
    state = os.fstat(fd)
    os.fchmod(fd, 0o600)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.fchmod(fd, state.st_mode & 0o777)
