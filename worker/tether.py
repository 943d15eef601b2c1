"""Ties between a holder and its engine that the kernel keeps: who inherits orphans, who dies with whom."""

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Processes orphaned below this one become its children, so that it can end and reap them. Raises OSError."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def dying_with_parent() -> Callable[[], None]:
    """What a child runs between fork and exec, so that the kernel kills it when this process dies.

    The tie is to the forking *thread*: call it, and fork, from a thread that lives as long as the process.
    """
    parent = os.getpid()

    def bind() -> None:
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the tie was made
            os._exit(1)

    return bind


def die_with(parent: int) -> None:
    """Tie the calling process to its parent `parent`, by whom it was not started. It ends here if that one is dead."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
