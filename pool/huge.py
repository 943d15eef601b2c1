"""Memory for segments in huge pages, where the kernel gives them: an engine maps half a gigabyte in no time then.

Small pages are mapped and unmapped one by one, 70 ms a GiB and as much again to leave; that is most of what a wake on a CPU
waits for. tmpfs gives huge ones by itself only where an administrator said so (`shmem_enabled`, `huge=`). But since Linux 6.1 a
process may ask for a range to be collapsed into them whatever the setting, also if only the first page of each is there: then
the kernel allocates the huge page, and this is faster than to allocate the small ones.
"""

import os

from pool.mapping import HUGE_PAGE, PAGE, collapse

CHUNK_BYTES = 32 << 20
"""At once: 5 ms where huge pages lie ready, 50 where the kernel has to move others out of the way."""


def allocate(fd: int, offset: int, size: int) -> None:
    """Give these bytes of a writable file memory, in huge pages as far as they can be had. Raises OSError (ENOSPC: no more)."""
    if os.fstat(fd).st_size < offset + size:
        os.ftruncate(fd, offset + size)
    first, last = -(-offset // HUGE_PAGE) * HUGE_PAGE, (offset + size) // HUGE_PAGE * HUGE_PAGE
    for at in range(first, last, CHUNK_BYTES):
        if not _huge(fd, at, min(CHUNK_BYTES, last - at)):
            break
    os.posix_fallocate(fd, offset, size)  # what is missing


def in_huge_pages(fd: int, size: int) -> bool:
    """Whether the first bytes of a writable file lie in huge pages, but for less than one at the end; now, if not before."""
    whole = size // HUGE_PAGE * HUGE_PAGE
    return bool(whole) and collapse(fd, 0, whole)


def _huge(fd: int, offset: int, size: int) -> bool:
    """Whether the range is in huge pages now; if not, some of its pages may be there."""
    os.posix_fallocate(fd, offset, PAGE)
    if not collapse(fd, offset, HUGE_PAGE):  # before pages are strewn over a file that is no shared memory
        return False
    for at in range(offset, offset + size, HUGE_PAGE):
        os.posix_fallocate(fd, at, PAGE)
    return collapse(fd, offset, size)
