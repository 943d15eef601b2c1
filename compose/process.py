"""One operating-system process: who it is for sure, when it ends, and how to end it."""

import ctypes
import os
import signal
import time
from typing import Final

from worker import processes
from worker.processes import Process

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Identity(Process, frozen=True):
    """Who a process is (`worker.processes`), with what one does to it."""

    @staticmethod
    def of(pid: int) -> "Identity | None":
        """The identity of a live process; None when there is none, or only a zombie."""
        known = processes.identify(pid)
        return Identity(known.pid, known.started, known.boot) if known is not None and processes.alive(known) else None

    @property
    def alive(self) -> bool:
        return processes.alive(self)

    def send(self, number: signal.Signals) -> None:
        """Signal it, and never another process that got its pid since."""
        processes.send(self, number)

    async def ended(self, deadline_s: float | None = None) -> bool:
        """Wait until the process has ended; False when the deadline came first. Works for other people's children too."""
        return await processes.ended(self, deadline_s)


async def end(
    processes: list[Identity], *, deadline_s: float, number: signal.Signals = signal.SIGTERM, kill_s: float = 5.0
) -> list[Identity]:
    """Ask the processes to end, kill those that have not by the deadline. Return those that had to be killed.

    Raises:
        TimeoutError: one is alive `kill_s` after SIGKILL (it hangs in the kernel).
    """
    for process in processes:
        process.send(number)
    until = time.monotonic() + deadline_s
    late = [one for one in processes if not await one.ended(max(0.0, until - time.monotonic()))]
    for process in late:
        process.send(signal.SIGKILL)
    for process in late:
        if not await process.ended(kill_s):
            raise TimeoutError(f"process {process.pid} is alive {kill_s:g} s after SIGKILL")
    return late


def untether() -> None:
    """In a child: live on when the parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def tether(parent: int, number: signal.Signals = signal.SIGTERM) -> None:
    """In a child between fork and exec: get `number` when the parent dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
