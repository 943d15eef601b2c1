"""A directory put in another's place at once, so that no moment is left in which the disk has neither under its name."""

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

_AT_FDCWD: Final = -100
_EXCHANGE: Final = 0x2
_CANNOT: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What a file system or a kernel says that has no exchange."""


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two directories of one file system; False: it can't be done here. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        renameat2 = libc.renameat2
    except AttributeError:
        return False
    renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    failed = ctypes.get_errno()
    if failed in _CANNOT:
        return False
    raise OSError(failed, os.strerror(failed), str(one), None, str(other))
