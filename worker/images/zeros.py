"""Pages of zeros in an image: nearly half of one of an engine that was taken off its GPU. They need not be on the disk.

They are looked for in the page cache, right after the dump.
"""

import ctypes
import errno
import itertools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from worker.images.holes import Extent
from worker.images.pages import PAGE, Run

LEAST_BYTES: Final = 64 << 10
"""Of a run that is worth it: each cuts the file's extents, and the memory's pieces, in two."""
BLOCK: Final = LEAST_BYTES // 2
"""What is looked at first. Every run that is worth it has a whole one, wherever it begins."""
PIECE: Final = 2 << 20
"""Read at a time: it should still be in the processor's cache when it is looked at."""
PART: Final = 16 * PIECE
"""Of one thread at a time."""
THREADS: Final = 4
"""More wait for one another's turn at the interpreter, between two pieces."""
_NOTHING: Final = bytes(PIECE)
_BLOCK: Final = bytes(BLOCK)
_PAGE: Final = bytes(PAGE)


def find(path: Path, runs: Iterable[Run], threads: int = THREADS) -> list[Extent]:
    """Where in the file, in the places of `runs` (in its order), are zeros that are worth it. Raises OSError."""
    parts = [Extent(at, min(PART, one.end - at)) for one in _extents(runs) for at in range(one.offset, one.end, PART)]
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(threads, "zeros") as pool:
            seen = pool.map(lambda part: list(_in_part(descriptor, path, part)), parts)
            return [hole for hole in _joined(itertools.chain.from_iterable(seen)) if hole.size >= LEAST_BYTES]
    finally:
        os.close(descriptor)


def apart(runs: Iterable[Run], holes: list[Extent]) -> tuple[list[Run], list[Run]]:
    """What of `runs` lies in no hole, and what does. Both are in the file's order."""
    data, zeros, at = list[Run](), list[Run](), 0
    for run in runs:
        here, end = run.offset, run.offset + run.size
        while here < end:
            while at < len(holes) and holes[at].end <= here:
                at += 1
            into, until = data, end
            if at < len(holes):
                inside = holes[at].offset <= here
                into, until = (zeros, min(end, holes[at].end)) if inside else (data, min(end, holes[at].offset))
            into.append(Run(run.start + here - run.offset, until - here, here))
            here = until
    return data, zeros


def _extents(runs: Iterable[Run]) -> Iterator[Extent]:
    """Runs that follow one another in the file, as one."""
    return _joined(Extent(run.offset, run.size) for run in runs)


def _joined(extents: Iterable[Extent]) -> Iterator[Extent]:
    last = Extent(0, 0)
    for one in extents:
        if last.end == one.offset:
            last = Extent(last.offset, last.size + one.size)
        else:
            yield last
            last = one
    yield last


def _in_part(descriptor: int, path: Path, part: Extent) -> Iterator[Extent]:
    """With those at the ends of pieces, however small: they may go on in the next one."""
    room = bytearray(PIECE)
    view, address = memoryview(room), ctypes.addressof(ctypes.c_char.from_buffer(room))
    same = ctypes.CDLL(None).memcmp
    same.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    for at in range(part.offset, part.end, PIECE):
        size = min(PIECE, part.end - at)
        if (got := os.preadv(descriptor, [view[:size]], at)) != size:
            raise OSError(errno.EIO, f"it gave {got} bytes of {size} at {at}", str(path))
        if same(address, _NOTHING, size) == 0:  # beside the other threads: what follows is one thread's at a time
            yield Extent(at, size)
        else:
            yield from (Extent(at + start, end - start) for start, end in _in_piece(room, size))


def _in_piece(room: bytearray, size: int) -> Iterator[tuple[int, int]]:
    """Runs of zero pages that have a whole block, and those at either end."""
    done = 0
    for at in (0, *range(BLOCK, size - BLOCK + 1, BLOCK), size - PAGE):
        if at < done or not room.startswith(_PAGE if at in (0, size - PAGE) else _BLOCK, at):
            continue
        start = end = at
        while start - PAGE >= done and room.startswith(_PAGE, start - PAGE):
            start -= PAGE
        while room.startswith(_BLOCK, end, size):
            end += BLOCK
        while room.startswith(_PAGE, end, size):
            end += PAGE
        yield start, end
        done = end
