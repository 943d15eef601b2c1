"""Parts of a file that take no room on the disk: they read as zeros, and the file stays as long as it is."""

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct

_PUNCH: Final = 0x02 | 0x01
"""fallocate(2): make a hole and keep the size."""

log = structlog.get_logger("images")


class Extent(Struct, frozen=True):
    """Bytes of a file that follow one another, whole pages."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def punch(path: Path, holes: Sequence[Extent]) -> int:
    """Make them; bytes, 0 where the file system has no holes: then all stays as it was. Raises OSError: it can't be opened.

    Who reads the file meanwhile finds the old bytes or zeros. Its size stays, its time does not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    made, descriptor = 0, os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for hole in holes:
            if libc.fallocate(descriptor, _PUNCH, hole.offset, hole.size) != 0:
                reason = os.strerror(ctypes.get_errno())
                log.info(
                    "no_holes", path=str(path), reason=reason, made_bytes=made, wanted_bytes=sum(one.size for one in holes)
                )
                break
            made += hole.size
    finally:
        os.close(descriptor)
    return made
