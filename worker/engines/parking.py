"""What an engine does around its image: forget what callers said, hold nothing of its instance, wait to be released."""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

POLL_S: Final = 0.005
EAGER_LOOKS: Final = 12_000
"""The first minute: longer than a dump or a restore takes. An image is made within it, so what comes from one is quick."""
PATIENT_S: Final = 0.025
"""From then on it waits for a place to go on, perhaps for hours, and its looks must cost nothing."""
MOST_LOOKS: Final = EAGER_LOOKS + 7 * 24 * 3600 * 40
"""A week of them."""
RELEASE: Final = "release"
"""Name of the file that ends the wait; its text is the directory of the instance that this engine now is."""
LARGEST: Final = 128 * 1024
"""From here on malloc gives each block a mapping of its own, which ends with it."""
SMALLEST: Final = 24
KEPT_BY_A_THREAD: Final = 32
"""Of every size up to 1 KiB malloc keeps a few (seven, unless told otherwise) out of everybody's sight."""
PAGE: Final = 4096
OBJECTS_BYTES: Final = 1 << 20
"""Of every small size: more than Python keeps free of any of them in an engine at rest."""


def forget() -> None:
    """Overwrite all memory that is free: what was said may still be in it. Some tens of milliseconds."""
    gc.collect()
    _fill_small()
    _fill_heap()


def _fill_small() -> None:
    """Python's own free blocks (up to 512 bytes), by taking more of every size than are free."""
    empty = sys.getsizeof(b"")
    for size in range(48, 513, 16):
        kept = [bytes(size - empty) for _ in range(OBJECTS_BYTES // size)]
        del kept


def _fill_heap() -> None:
    """Malloc's free blocks: take blocks of every size and zero them, largest first, until that needs new memory.

    Then no free block of that size is left that held anything; those that threads keep for themselves come last. New memory is
    what lies beyond the heap as it was: asking malloc for its figures instead takes 80 ms a time in an engine of 100,000 free
    blocks. Whole pages of free blocks go back to the kernel first, so of a large one only its ends hold anything.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_ssize_t]
    libc.malloc_trim(0)
    end = libc.sbrk(0)
    taken: list[int] = []

    def take(size: int) -> int:
        block: int = libc.malloc(size)
        if size > 2 * PAGE:
            ctypes.memset(block, 0, PAGE)
            ctypes.memset(block + size - PAGE, 0, PAGE)
        else:
            ctypes.memset(block, 0, size)
        taken.append(block)
        return block

    size = LARGEST - 64
    while size > SMALLEST:
        while take(size) < end:
            pass
        size = size * 7 // 8
    for size in range(SMALLEST, 2048, 16):
        for _ in range(KEPT_BY_A_THREAD):
            take(size)
    for block in taken:
        libc.free(block)
    libc.malloc_trim(0)


def leave_streams() -> None:
    """Standard output and error go nowhere: the log is the instance's."""
    sys.stdout.flush()
    sys.stderr.flush()
    _point(os.devnull, os.O_WRONLY)


def take_streams(log: Path) -> None:
    _point(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def await_release(place: Path, ended: Callable[[], bool]) -> Path | None:
    """Wait for the release, looking for it every few milliseconds; None: told to end, or nobody has wanted it for a week.

    Asking again and again is right here: a watch would be an object of the kernel in the image. Looks are counted, not
    seconds: an image may be used after a reboot, on another clock. (A holder's death kills its engine in any case.)
    """
    file = place / RELEASE
    for look in range(MOST_LOOKS):
        if ended():
            return None
        try:
            instance = Path(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            time.sleep(POLL_S if look < EAGER_LOOKS else PATIENT_S)
        else:
            file.unlink(missing_ok=True)
            return instance
    return None


def _point(path: str, flags: int) -> None:
    descriptor = os.open(path, flags, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
