"""A fake engine that is as large as a real one off its GPU: `python -m tests.bench.heavy --bytes N --threads T [--zeros F] --
ARGUMENTS`.

What a vLLM engine of 8B has when the driver has taken it off the GPU (measured: 2.9 GB of its own, 149 threads, shared areas of
16 MiB): the driver's copies in mappings of some MiB, a heap with holes, threads with memory of their own, torch's libraries.
Nearly half of a real one are pages of zeros; here as much as is said, in the driver's copies.
"""

import argparse
import ctypes
import mmap
import os
import random
import sys
import threading
from typing import Any

from worker.engines import process

PAGE = 4096
KEPT: list[Any] = []


def pattern(size: int, dice: random.Random) -> bytes:
    """No two pages alike, none of zeros."""
    block = dice.randbytes(min(size, 1 << 20))
    return (block * (size // len(block) + 1))[:size]


def mixed(dice: random.Random) -> bytes:
    """Runs of zeros of all lengths, with a byte in some of their pages, beside pages that are full."""
    parts = list[bytes]()
    for nth in range(96):
        parts.append(bytes(PAGE * dice.choice((1, 8, 15, 16, 17, 40))))
        parts.append((pattern(PAGE, dice), bytes(PAGE - 1) + b"x", b"x" + bytes(PAGE - 1))[nth % 3])
    return b"".join(parts)


def grow(size: int, threads: int, *, zeros: float, libraries: bool) -> None:
    dice = random.Random(1)
    if libraries:
        import torch

        KEPT.append(torch.ones(1 << 20))
    driver, heap, nothing = size * 6 // 10, size * 3 // 10, int(size * zeros)
    while driver > 0:
        part = min(driver, dice.choice((1, 2, 2, 4, 16, 64)) << 20)
        area = mmap.mmap(-1, part, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.write(bytes(part) if nothing > 0 else pattern(part, dice))
        KEPT.append(area)
        driver, nothing = driver - part, nothing - part
    if zeros:
        KEPT.append(mmap.mmap(-1, len(content := mixed(dice)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        KEPT[-1].write(content)
    parts: list[bytearray | None] = []
    while heap > 0:
        part = dice.randrange(1 << 10, 120 << 10)
        parts.append(bytearray(pattern(part, dice)))
        heap -= part
    for number in range(0, len(parts), 7):
        parts[number] = None
    KEPT.append(parts)
    each = size // 10 // max(1, threads)
    started = threading.Barrier(threads + 1)

    def live() -> None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        taken = [libc.malloc(32 << 10) for _ in range(max(1, each >> 15))]
        for block in taken:
            ctypes.memset(block, threading.get_ident() & 0xFF | 1, 32 << 10)
        started.wait()
        threading.Event().wait()

    for _ in range(threads):
        threading.Thread(target=live, daemon=True).start()
    started.wait()
    for _ in range(10):
        shared = mmap.mmap(-1, min(16 << 20, size // 100 & -4096 or 4096), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        shared.write(pattern(len(shared) // 2, dice) if zeros else pattern(len(shared), dice))
        shared.write(bytes(len(shared) - shared.tell()))
        KEPT.append(shared)
    KEPT.extend(os.eventfd(0) for _ in range(15))
    KEPT.extend(os.pipe() for _ in range(20))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=2 << 30)
    parser.add_argument("--threads", type=int, default=100)
    parser.add_argument("--zeros", type=float, default=0.0, help="part of it all that is pages of zeros, at most 0.6")
    parser.add_argument("--no-libraries", action="store_true")
    options, rest = parser.parse_known_args()
    grow(options.bytes, options.threads, zeros=options.zeros, libraries=not options.no_libraries)
    sys.argv = [sys.argv[0], *(word for word in rest if word != "--")]
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
