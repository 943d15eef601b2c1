"""What is in files: how much, and its digest. They are read and not mapped: a sector that can't be read is an error
then, and would be a signal (SIGBUS) otherwise. Holes are not read at all: the page cache would keep their zeros.

Hashing takes all processors, and so does reading from the page cache, in turns on two buffers: one thread alone copies a
few GB/s, a fraction of what is hashed.
"""

import bisect
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from blake3 import blake3

SLICE_BYTES: Final = 2 << 20
"""What each thread reads at a time: it should still be in the processor's cache when it is hashed."""
MOST_READERS: Final = 8


def digest(path: Path) -> str:
    """blake3, hex. Raises OSError, also when the file becomes shorter meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _Opened(descriptor, path).digest()
    finally:
        os.close(descriptor)


def data_bytes(path: Path) -> int:
    """Bytes of a file without its holes; all of them where its file system knows of none. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return sum(end - start for start, end in _data(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


def taken_bytes(directory: Path) -> int:
    """Of the disk, by all files below a directory; what goes meanwhile takes none. Raises OSError."""
    return sum(_blocks(Path(place, name)) for place, _, names in os.walk(directory, onerror=_gone) for name in names)


def _gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _blocks(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where in a file there are no holes, from beginning to end. Raises OSError."""
    at = 0
    while at < size:
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.EINVAL:  # it can't be asked
                yield at, size
            elif error.errno != errno.ENXIO:  # nothing but a hole from there on
                raise
            return
        at = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        if start < at:
            yield start, at


class _Opened:
    """A file that is read from beginning to end. Raises OSError."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor, self._path, self._size = descriptor, path, os.fstat(descriptor).st_size
        self._data = list(_data(descriptor, self._size))
        self._ends = [end for _, end in self._data]

    def digest(self) -> str:
        hasher, size = blake3(max_threads=blake3.AUTO), self._size
        if size <= SLICE_BYTES:
            room = memoryview(bytearray(size))
            self._fill(room, 0)
            return self._whole(hasher.update(room))
        readers = min(MOST_READERS, len(os.sched_getaffinity(0)))
        piece = readers * SLICE_BYTES
        rooms = [memoryview(bytearray(min(piece, size))) for _ in range(2)]
        with ThreadPoolExecutor(readers, "file-reader") as pool:
            coming = self._begin(pool, rooms[0], 0)
            for nth, at in enumerate(range(0, size, piece)):
                for slice_ in coming:
                    slice_.result()
                if (after := at + piece) < size:
                    coming = self._begin(pool, rooms[(nth + 1) % 2][: size - after], after)
                hasher.update(rooms[nth % 2][: size - at])
        return self._whole(hasher)

    def _whole(self, hasher: blake3) -> str:
        """In a hole nothing is read that could have told."""
        if (size := os.fstat(self._descriptor).st_size) < self._size:
            raise self._ended(size, self._size)
        return hasher.hexdigest()

    def _begin(self, pool: ThreadPoolExecutor, piece: memoryview, at: int) -> list[Future[None]]:
        """Have a piece read, in slices."""
        slices = range(0, len(piece), SLICE_BYTES)
        return [pool.submit(self._fill, piece[start : start + SLICE_BYTES], at + start) for start in slices]

    def _fill(self, room: memoryview, at: int) -> None:
        done, nth = 0, bisect.bisect_right(self._ends, at)
        while done < len(room):
            start, end = self._data[nth] if nth < len(self._data) else (self._size, self._size)
            nth += 1
            if (hole := min(start - at, len(room)) - done) > 0:
                ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(room, done)), 0, hole)  # beside the other threads
                done += hole
            self._read(room[done : end - at], at + done)
            done = min(end - at, len(room))

    def _read(self, room: memoryview, at: int) -> None:
        done = 0
        while done < len(room):
            count = os.preadv(self._descriptor, [room[done:]], at + done)
            if count == 0:
                raise self._ended(at + done, at + len(room))
            done += count

    def _ended(self, at: int, wanted: int) -> OSError:
        return OSError(errno.EIO, f"it ends at byte {at}, before byte {wanted}", str(self._path))
