"""The daemon's own view of its segments, from which devices are filled: mapped once, pinned piece by piece in spare time."""

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pool.gpu import Gpu
from pool.mapping import map_shared, unmap

PIN_BYTES = 64 << 20
"""At once: a wake that finds the lane pinning waits 10 ms. A multiple of one copy's size, for no copy may leave a range."""
log = logging.getLogger("pool")


@dataclass
class Slab:
    """One segment. Lanes of several devices may want it at the same time: what is pinned is pinned for all of them."""

    address: int
    size: int
    pinned: int = 0
    """Bytes from its start."""
    refused: bool = False
    """The driver does not pin it: copies from the rest go through the driver's own buffers."""
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Whose piece it is: the driver refuses a range that another thread is pinning, and that is no refusal of the memory."""

    @classmethod
    def over(cls, fd: int, size: int) -> "Slab":
        """A mapping of a writable file; the descriptor stays the caller's. Raises OSError."""
        return cls(map_shared(os.dup(fd), size), size)

    @property
    def registered(self) -> bool:
        return self.pinned == self.size

    @property
    def to_pin(self) -> bool:
        return not (self.registered or self.refused)

    def pin(self, gpu: Gpu) -> None:
        """The next piece. A refusal costs speed only. The pages have been touched: else this runs at a tenth of the speed."""
        with self._turn:
            if not self.to_pin:
                return
            size = min(PIN_BYTES, self.size - self.pinned)
            try:
                gpu.register(self.address + self.pinned, size)
            except OSError as error:
                self.refused = True
                log.warning("not_pinned", extra={"bytes": self.size - self.pinned, "why": str(error)})
            else:
                self.pinned += size

    def register(self, gpu: Gpu) -> None:
        """All of it."""
        while self.to_pin:
            self.pin(gpu)

    def give_up(self, gpu: Gpu) -> bool:
        """Unpin and unmap its last piece, for nobody copies from it any more; True: nothing is left. Raises OSError.

        In pieces, for meanwhile a driver that wants addresses waits: 48 ms a GiB in small pages, by the kernel's lock on them.
        """
        with self._turn:
            self.refused = True
            at = (self.size - 1) // PIN_BYTES * PIN_BYTES
            if at < self.pinned:
                gpu.unregister(self.address + at)
                self.pinned = at
            unmap(self.address + at, self.size - at)
            self.size = at
            return not at


@dataclass
class Slabs:
    """Of one set, those that go to devices."""

    weight_set: str
    parts: list[Slab] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(part.size for part in self.parts)

    def bytes_of(self, groups: Iterable[Iterable[int]]) -> int:
        return sum(self.parts[number].size for group in groups for number in group)

    @property
    def registered_bytes(self) -> int:
        return sum(part.pinned for part in self.parts)

    def map(self, fds: Sequence[int], sizes: Sequence[int], there: Mapping[int, Slab]) -> None:
        """`there`: segments that are mapped already. Raises OSError; nothing is mapped then."""
        mapped: list[Slab] = []
        try:
            for number, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
                if (part := there.get(number)) is None:
                    mapped.append(part := Slab(map_shared(_writable(fd), size), size))
                self.parts.append(part)
        except OSError:
            for part in mapped:  # the others are pinned, and whoever has them goes on with them
                unmap(part.address, part.size)
            self.parts.clear()
            raise


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
