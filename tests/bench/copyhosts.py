"""Kinds of host memory that a copy to a GPU may run from, in pieces like a model's segments."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pool.mapping import map_shared, unmap

MIB = 1 << 20
LAYER = (50 * MIB, 34 * MIB, 202 * MIB, 100 * MIB)
"""Segments of one layer of an 8B shape."""
SMALL = 2 * MIB
TOUCHERS = 16


@dataclass
class Host:
    """Host memory of one kind, a piece for each segment."""

    kind: str
    pieces: list[tuple[int, int]]
    """Address, size: pinned one by one."""
    close: Callable[[], None]


def sizes(total: int) -> list[int]:
    found = [SMALL] * 3
    while sum(found) < total:
        found += LAYER
    return found


# ---- host memory --------------------------------------------------------------------------------------------


def files(kind: str, directory: str | None, wanted: list[int], flags: int = 0) -> Iterator[Host]:
    """Touched, mapped and pinned, one file a segment, as the pool keeps them."""
    from pool.cuda import checked, driver

    fds = []
    for number, size in enumerate(wanted):
        if directory is None:
            fd = os.memfd_create(f"copy-{number}", flags)
        else:
            fd = os.open(f"{directory}/{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, size)
        fds.append(fd)
    begun = time.monotonic()
    with ThreadPoolExecutor(TOUCHERS) as threads:
        if directory is None:
            pieces = [(map_shared(os.dup(fd), size), size) for fd, size in zip(fds, wanted, strict=True)]
            import ctypes

            list(threads.map(lambda piece: ctypes.memset(piece[0], 7, piece[1]), pieces))
        else:
            list(threads.map(lambda pair: os.posix_fallocate(pair[0], 0, pair[1]), zip(fds, wanted, strict=True)))
            pieces = [(map_shared(os.dup(fd), size), size) for fd, size in zip(fds, wanted, strict=True)]
    touched = time.monotonic()
    for address, size in pieces:
        checked("register", driver.cuMemHostRegister(address, size, 1))
    pinned = time.monotonic()
    total = sum(wanted)
    print(f"  {kind}: touched at {total / (touched - begun) / 1e9:.1f} GB/s, pinned at {total / (pinned - touched) / 1e9:.1f}")

    def close() -> None:
        for address, size in pieces:
            checked("unregister", driver.cuMemHostUnregister(address))
            unmap(address, size)
        for fd in fds:
            os.close(fd)
        if directory is not None:
            for number in range(len(wanted)):
                os.unlink(f"{directory}/{number}")

    yield Host(kind, pieces, close)


def driver_memory(wanted: list[int]) -> Iterator[Host]:
    from pool.cuda import checked, driver

    pieces = [(int(checked("host alloc", driver.cuMemHostAlloc(size, 1))), size) for size in wanted]

    def close() -> None:
        for address, _ in pieces:
            checked("free", driver.cuMemFreeHost(address))

    yield Host("alloc", pieces, close)


def shared(wanted: list[int]) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield from files("shm", directory, wanted)


def transparent(wanted: list[int]) -> Iterator[Host]:
    """A file system of our own in shared memory that gives huge pages where it can."""
    with tempfile.TemporaryDirectory() as directory:
        size = sum(wanted) + (64 << 20)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"huge=always,size={size},mode=0700", "enginehouse-bench", directory], check=True
        )
        try:
            yield from files("thp", directory, wanted)
            lines = Path("/proc/meminfo").read_text().splitlines()
            print("  " + ", ".join(line for line in lines if "ShmemHuge" in line or "ShmemPmd" in line))
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


def huge(wanted: list[int]) -> Iterator[Host]:
    """Pages of 2 MiB that the system keeps for whoever asks."""
    count = Path("/proc/sys/vm/nr_hugepages")
    before = count.read_text()
    count.write_text(str(-(-sum(wanted) // (2 * MIB)) + 8))
    try:
        yield from files("hugetlb", None, wanted, flags=0x0004 | 0x0001)
    finally:
        count.write_text(before)


HOSTS = {"alloc": driver_memory, "shm": shared, "thp": transparent, "hugetlb": huge}
