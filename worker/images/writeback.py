"""Has a disk begin with a file that will have to be on it, so that files don't wait for it one after another."""

import ctypes
import os
from pathlib import Path
from typing import Final

_WRITE: Final = 0x2
"""sync_file_range(2): begin to write, and wait for nothing. An error of the disk is left for the file's fsync."""


def begin(path: Path) -> None:
    """Raises OSError unless it can be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _range()(descriptor, 0, 0, _WRITE)  # a file system that can't has more to do at the fsync, that is all
    finally:
        os.close(descriptor)


def _range() -> "ctypes._NamedFuncPointer":
    sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
    sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return sync_file_range
