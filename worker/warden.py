"""Who ends what a holder leaves behind where no pid namespace does.

A holder that is killed in the middle of a restore leaves CRIU behind, and what CRIU has brought to life: no record says whose
that is, and its pids prove nothing. But orphans become children of the nearest process above them that has asked for it. So a
process above the holder waits for its end, and whoever is a child of that process then can only be the holder's leaving.
"""

import contextlib
import os
import signal
import time
from typing import Final

from worker import processes, tether
from worker.images.surgery import children
from worker.processes import Process

POLL_S: Final = 0.01


def enter(lock: int) -> Process:
    """Go on below a warden, and return who that is. `lock`: the holder's alone, and let go of by the warden.

    The calling process ends; a grandchild of it returns from here. Raises OSError.
    """
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    tether.become_subreaper()
    warden = os.getpid()
    if (holder := os.fork()) != 0:
        os.close(lock)
        _outlast(holder)
        os._exit(0)
    os.setsid()
    known = processes.identify(warden)
    assert known is not None, "our parent: it lives until we end"
    return known


def _outlast(holder: int) -> None:
    """Wait for the holder's end; then end and reap all that is left of it, whatever starts meanwhile."""
    os.waitpid(holder, 0)
    while left := children():
        for pid in left:  # ours and not reaped, so the pid can't mean another
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(POLL_S)
