"""Has a disk begin early with what will have to be on it, so that little is left when somebody waits for that."""

import ctypes
import os
import threading
from pathlib import Path
from typing import Final

POLL_S: Final = 0.03
LEAST_BYTES: Final = 16 << 20
"""Of a file that still grows, at a time."""
_WRITE: Final = 0x2
"""sync_file_range(2): begin to write, and wait for nothing. An error of the disk is left for the file's fsync."""


def follow(directory: Path, pattern: str, ended: threading.Event) -> None:
    """Begin with what comes into the directory's files until `ended` is set. It only saves time: no failure is one here."""
    begun: dict[Path, int] = {}
    while not ended.wait(POLL_S):
        for path in directory.glob(pattern):
            try:
                size, had = path.stat().st_size, begun.get(path, 0)
                if size - had >= LEAST_BYTES:
                    begin(path, had, size - had)
                    begun[path] = size
            except OSError:
                continue  # renamed or removed just now, or a disk that fails: its fsync says so


def begin(path: Path, at: int = 0, size: int = 0) -> None:
    """Begin to write some of a file; size 0: all from there on. Raises OSError unless it can be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _range()(descriptor, at, size, _WRITE)  # a file system that can't has more to do at the fsync, that is all
    finally:
        os.close(descriptor)


def _range() -> "ctypes._NamedFuncPointer":
    sync_file_range = ctypes.CDLL(None, use_errno=True).sync_file_range
    sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return sync_file_range
