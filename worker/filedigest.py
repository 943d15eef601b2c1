"""What is in files: how much, and its digest. They are read and not mapped: a sector that can't be read is an error
then, and would be a signal (SIGBUS) otherwise.

Hashing takes all processors, and so does reading from the page cache, in turns on two buffers: one thread alone copies a
few GB/s, a fraction of what is hashed.
"""

import errno
import os
import stat
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
        return _digest(descriptor, path, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def data_bytes(path: Path) -> int:
    """Bytes of a file without its holes; all of them where its file system knows of none. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, at, size = 0, 0, os.fstat(descriptor).st_size
        while at < size:
            try:
                start = os.lseek(descriptor, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return size  # it can't be asked
                if error.errno != errno.ENXIO:  # nothing but a hole from there on
                    raise
                break
            at = os.lseek(descriptor, start, os.SEEK_HOLE)
            found += at - start
        return found
    finally:
        os.close(descriptor)


def taken_bytes(directory: Path) -> int:
    """Of the disk, by all files below a directory; what goes meanwhile takes none."""
    return sum(_blocks(path) for path in directory.rglob("*"))


def _blocks(path: Path) -> int:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0


def _digest(descriptor: int, path: Path, size: int) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    if size <= SLICE_BYTES:
        room = memoryview(bytearray(size))
        _fill(descriptor, path, room, 0)
        return hasher.update(room).hexdigest()
    readers = min(MOST_READERS, len(os.sched_getaffinity(0)))
    piece = readers * SLICE_BYTES
    rooms = [memoryview(bytearray(min(piece, size))) for _ in range(2)]
    with ThreadPoolExecutor(readers, "file-reader") as pool:
        coming = _begin(pool, descriptor, path, rooms[0], 0)
        for nth, at in enumerate(range(0, size, piece)):
            for slice_ in coming:
                slice_.result()
            if (after := at + piece) < size:
                coming = _begin(pool, descriptor, path, rooms[(nth + 1) % 2][: size - after], after)
            hasher.update(rooms[nth % 2][: size - at])
    return hasher.hexdigest()


def _begin(pool: ThreadPoolExecutor, descriptor: int, path: Path, piece: memoryview, at: int) -> list[Future[None]]:
    """Have a piece read, in slices."""
    slices = range(0, len(piece), SLICE_BYTES)
    return [pool.submit(_fill, descriptor, path, piece[start : start + SLICE_BYTES], at + start) for start in slices]


def _fill(descriptor: int, path: Path, room: memoryview, at: int) -> None:
    done = 0
    while done < len(room):
        count = os.preadv(descriptor, [room[done:]], at + done)
        if count == 0:
            raise OSError(errno.EIO, f"it ends at byte {at + done}, before byte {at + len(room)}", str(path))
        done += count
