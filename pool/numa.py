"""The machine's memory nodes: how large, how pages are made to lie on one, where they do lie.

mbind(2) and move_pages(2) are not in the C library; their numbers are those of the kernel's
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h. A policy over a mapping of shared memory belongs
to the file (Documentation/admin-guide/mm/numa_memory_policy.rst there): whoever touches a page first, it lies where said.
"""

import contextlib
import ctypes
import errno
import os
import platform
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pool.mapping import PAGE, map_shared, unmap

SYSFS = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")
_CALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}
"""mbind, move_pages."""
_PREFERRED = 1
"""MPOL_PREFERRED: another node's memory if that one has no more, never a failure."""
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_libc = ctypes.CDLL(None, use_errno=True)


class MemoryNode(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    total_bytes: int
    free_bytes: int
    """With what the page cache gives back at once."""


def read_nodes(sysfs: Path = SYSFS, status: Path = STATUS) -> tuple[MemoryNode, ...]:
    """Those that have memory which this process may use, by number; none where the kernel does not tell."""
    found = []
    allowed = _allowed(status)
    for path in sysfs.glob("node[0-9]*"):
        if allowed is not None and int(path.name[4:]) not in allowed:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):  # taken out meanwhile
            lines = (path / "meminfo").read_text().splitlines()
            told = {line.split(":")[0].split()[-1]: int(line.split()[3]) << 10 for line in lines}
            if told["MemTotal"]:
                free = told["MemFree"] + told["Inactive(file)"]
                found.append(MemoryNode(number=int(path.name[4:]), total_bytes=told["MemTotal"], free_bytes=free))
    return tuple(sorted(found, key=lambda node: node.number))


def _allowed(status: Path) -> frozenset[int] | None:
    """Nodes that this process's cpuset (a container's, say) leaves to it; None: the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in status.read_text().splitlines() if line.startswith("Mems_allowed_list:"))
        ranges = [part.partition("-") for part in line.split()[1].split(",")]
        return frozenset(node for first, _, last in ranges for node in range(int(first), int(last or first) + 1))
    return None


def _call(number: int, what: str, *arguments: object) -> None:
    if _libc.syscall(ctypes.c_long(number), *arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _numbers() -> tuple[int, int]:
    calls = _CALLS.get(platform.machine())
    if calls is None or _LONG_BITS != 64:  # a process of 32 bits has other numbers
        raise OSError(errno.ENOSYS, f"mbind's number on {platform.machine()} is not known here")
    return calls


def prefer(address: int, size: int, node: int) -> None:
    """Pages of this mapping that nobody has touched yet come from that node, as long as it has any.

    Raises OSError: EPERM or ENOSYS where a container forbids it, EINVAL for a node that there is not.
    """
    words = node // _LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[-1] = 1 << node % _LONG_BITS
    _call(
        _numbers()[0], "mbind", ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_ulong(_PREFERRED), mask,
        ctypes.c_ulong(words * _LONG_BITS + 1), ctypes.c_uint(0),
    )  # fmt: skip


def prefer_file(fd: int, size: int, node: int) -> None:
    """The same of a file in shared memory, for good and for every process; it may be shorter yet. Raises OSError."""
    with _mapped(fd, size) as address:
        prefer(address, size, node)


def where(address: int, size: int, *, samples: int = 32) -> Counter[int]:
    """On which node so many pages of a mapping lie, evenly chosen; a page that is not there is touched. Raises OSError."""
    step = max(size // samples // PAGE, 1) * PAGE
    pages = list(range(address, address + size, step))
    for page in pages:
        ctypes.c_ubyte.from_address(page).value  # noqa: B018 - to have it in this process's tables
    status = (ctypes.c_int * len(pages))()
    _call(
        _numbers()[1], "move_pages", ctypes.c_int(0), ctypes.c_ulong(len(pages)), (ctypes.c_void_p * len(pages))(*pages), None,
        status, ctypes.c_int(0),
    )  # fmt: skip
    return Counter(node for node in status if node >= 0)


def node_of_file(fd: int, size: int) -> int | None:
    """Where most of it lies; None: not known. Raises OSError."""
    with _mapped(fd, size) as address:
        return max(found.items(), key=lambda pair: pair[1])[0] if (found := where(address, size)) else None


@contextlib.contextmanager
def _mapped(fd: int, size: int) -> Iterator[int]:
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)
    address = map_shared(os.dup(fd), size)
    try:
        yield address
    finally:
        unmap(address, size)
