"""Address space of an engine that a weight set comes and goes in: reserved once, mapped over in place.

The addresses never change, so tensors made over a `Reservation` stay what they are while weights leave and return.
A Python `mmap` object cannot do this: it refuses to close while a tensor looks into it.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
"""A reservation starts on one, so that a large tensor's alignment within its segment is an alignment of its address."""
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22
_MADV_COLLAPSE = 25
_POPULATE_BYTES = 32 << 20
"""Per call: small enough to spread over threads, large enough that calls cost nothing."""
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map(address: int | None, size: int, protection: int, flags: int, fd: int, *, offset: int = 0) -> int:
    got = _libc.mmap(address, size, protection, flags, fd, offset)
    if got is None or got == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return int(got)


def _hide(address: int, size: int) -> None:
    """Nothing behind these addresses any more; a touch is a SIGSEGV, another mmap does not get them."""
    _map(address, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED, -1)


def map_shared(fd: int, size: int) -> int:
    """Map a file's first bytes for reading and writing wherever there is room; closes the descriptor. Raises OSError.

    It starts on a huge page: elsewhere the kernel maps even huge pages as 512 small ones, and fills and pins them one by one
    (measured: 200 ms a GiB instead of 1).
    """
    size = -(-size // PAGE) * PAGE
    try:
        start = _map(None, size + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        address = -(-start // HUGE_PAGE) * HUGE_PAGE
        try:
            _map(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            unmap(start, size + HUGE_PAGE)
            raise
    finally:
        os.close(fd)
    if address > start:
        unmap(start, address - start)
    unmap(address + size, start + HUGE_PAGE - address)
    return address


def window(address: int, size: int) -> memoryview:
    """Mapped bytes to read and write, without a copy. Nobody may use it once they are unmapped."""
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def unmap(address: int, size: int) -> None:
    """Give addresses back to the system."""
    if _libc.munmap(address, size):
        raise OSError(ctypes.get_errno(), f"munmap of {size} bytes")


def collapse(fd: int, offset: int, size: int) -> bool:
    """Put a range of a file in shared memory, of whole huge pages, into huge pages. False: the kernel does not (it has none to
    give, is older than 6.1, or the file is elsewhere); some of it may be then."""
    reservation = Reservation(size)
    try:
        _map(reservation.address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset=offset)
        return bool(_libc.madvise(reservation.address, size, _MADV_COLLAPSE) == 0)
    finally:
        reservation.close()


class _Window:
    """What numpy keeps as the owner of a view: it keeps the reservation from being unmapped while somebody looks."""

    def __init__(self, reservation: "Reservation", address: int, size: int) -> None:
        self._reservation = reservation
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (size,), "typestr": "|u1"}


class Reservation:
    """`size` bytes of addresses (rounded up to the page), empty until `attach`.

    Given back to the system when the reservation *and* every view of it are gone.
    """

    def __init__(self, size: int) -> None:
        """Raises ValueError for a size below 1, OSError if the address space is not to be had."""
        if size < 1:
            raise ValueError(f"a reservation needs at least 1 byte, not {size}")
        self.size = -(-size // PAGE) * PAGE
        span = self.size + HUGE_PAGE
        start = _map(None, span, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self.address = -(-start // HUGE_PAGE) * HUGE_PAGE
        self._sizes: tuple[int, ...] = ()
        self._free = weakref.finalize(self, unmap, start, span)
        # Not at exit: other threads may still be reading then, and the system takes it all back anyway.
        self._free.atexit = False

    def close(self) -> None:
        """Give the addresses back at once. There must be no view of them."""
        self._free()

    @property
    def attached_bytes(self) -> int:
        return sum(self._sizes)

    def attach(self, fds: Sequence[int], sizes: Sequence[int], *, populate: bool = False) -> None:
        """Map segment after segment, read-only and shared. The descriptors may be closed afterwards.

        populate: fill the page tables now (2 ms a GiB in huge pages, 100 to 150 in small ones) instead of at each first touch.
        Raises ValueError for sizes that do not fit or files shorter than said, OSError from mmap; both leave it detached.
        """
        if self._sizes:
            raise ValueError("already attached: detach first")
        if len(fds) != len(sizes) or not sizes or any(size < 1 or size % PAGE for size in sizes):
            raise ValueError(f"{len(fds)} descriptors for {len(sizes)} sizes, each a positive multiple of {PAGE}")
        if sum(sizes) > self.size:
            raise ValueError(f"segments of {sum(sizes)} bytes in a reservation of {self.size}")
        for fd, size in zip(fds, sizes, strict=True):
            if (there := os.fstat(fd).st_size) < size:  # mapped, its tail would be a SIGBUS
                raise ValueError(f"a segment of {size} bytes whose file has {there}")
        at = self.address
        try:
            for fd, size in zip(fds, sizes, strict=True):
                _map(at, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
                at += size
        except OSError:
            _hide(self.address, self.size)
            raise
        self._sizes = tuple(sizes)
        if populate:
            self._populate()

    def _populate(self) -> None:
        """Best effort: a kernel before 5.14 does not know how, and each page then comes at its first touch."""
        end = self.address + self.attached_bytes
        chunks = [(at, min(_POPULATE_BYTES, end - at)) for at in range(self.address, end, _POPULATE_BYTES)]
        with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1), "pool-populate") as threads:
            list(threads.map(lambda chunk: _libc.madvise(*chunk, _MADV_POPULATE_READ), chunks))

    def detach(self) -> None:
        """Unmap; the addresses stay ours. Reading a view before the next `attach` is a SIGSEGV. Twice is fine."""
        if self._sizes:
            _hide(self.address, self.size)
            self._sizes = ()

    def start(self, segment: int) -> int:
        """Offset of an attached segment within the reservation, in bytes."""
        return sum(self._sizes[:segment])

    def view(self, offset: int, size: int) -> "npt.NDArray[np.uint8]":
        """Bytes `[offset, offset + size)` of the reservation, whether attached or not.

        numpy believes it writable (then `torch.from_numpy(view).view(dtype).view(shape)`, which copies nothing, does not warn;
        torch has no read-only tensors). The memory is not: a write is a SIGSEGV. Raises ValueError outside the reservation.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset}..{offset + size} of a reservation of {self.size}")
        import numpy as np  # noqa: PLC0415 (the pool's daemon looks at no weights; it starts in half the time)

        return np.asarray(_Window(self, self.address + offset, size))
