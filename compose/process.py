"""One operating-system process: who it is for sure, when it ends, and how to end it."""

import asyncio
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Final

import msgspec

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)
BOOT: Final = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A pid alone is no identity: the kernel uses it again. With its start time (clock ticks since boot) and the boot it is."""

    pid: int
    started: int
    boot: str = BOOT

    @staticmethod
    def of(pid: int) -> "Identity | None":
        """The identity of a live process; None when there is none, or only a zombie."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else Identity(pid=pid, started=int(fields[19]))

    @property
    def alive(self) -> bool:
        return self.boot == BOOT and Identity.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Signal it, and never another process that got its pid since."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return
        finally:
            os.close(descriptor)

    async def ended(self, deadline_s: float | None = None) -> bool:
        """Wait until the process has ended; False when the deadline came first. Works for other people's children too."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            loop, over = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(descriptor, over.set)
            try:
                await asyncio.wait_for(over.wait(), deadline_s)
            except TimeoutError:
                return False
            finally:
                loop.remove_reader(descriptor)
            return True
        finally:
            os.close(descriptor)


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
