"""A server as a process of a session of its own: started as another account if need be, waited for, stopped in order."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compose.embedded.refusal import ServerRefusal
from controlplane.quantities import human_bytes

ROOM_BYTES: Final = 1 << 30
"""A log that can't grow stops the plane, so it isn't started with less room than this."""
KILL_S: Final = 5.0
"""From SIGKILL to the end; beyond that the process hangs in the kernel."""


@dataclass(frozen=True)
class Account:
    """The account that a server runs as, when it can't be ours."""

    name: str
    uid: int
    gid: int


class ServerProcess:
    """One run of a server. Not tied to an event loop."""

    def __init__(self, argv: Sequence[str], *, log: Path, account: Account | None = None, cwd: str = "/") -> None:
        """Start `argv`, its output appended to `log` (0600). It gets no environment of ours beyond the path and locale."""
        environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.popen: subprocess.Popen[bytes] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, cwd=cwd, env=environment, umask=0o077,
                start_new_session=True, user=account.uid if account else None,
                group=account.gid if account else None,
                extra_groups=[] if account else None,
            )  # fmt: skip
        finally:
            os.close(descriptor)
        self.log = log

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    async def exited(self) -> int:
        """Wait for its end; return its exit status (negative: the signal)."""
        await gone(self.pid) if self.alive else None
        return self.popen.wait()

    async def stop(self, steps: Sequence[tuple[signal.Signals, float]]) -> int:
        """Send each signal in turn until it is gone, waiting that many seconds after each; then kill it.

        Raises ServerRefusal (`not_ending`): it outlives that, too.
        """
        for number, patience_s in steps:
            if not self.alive:
                break
            self.popen.send_signal(number)
            try:
                async with asyncio.timeout(patience_s):
                    await self.exited()
            except TimeoutError:
                continue
        if self.alive:
            self.popen.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_S):
                return await self.exited()
        if self.alive:
            cure = "It hangs in the kernel: see dmesg, and the disk that it is on."
            raise ServerRefusal("not_ending", f"The server of pid {self.pid} outlives SIGKILL by {KILL_S:g} s.", cure)
        return self.popen.wait()

    def tail(self, characters: int = 600) -> str:
        """The end of its log, for an error message."""
        return self.log.read_text(errors="replace")[-characters:].strip()


async def gone(pid: int) -> None:
    """Wait until process `pid` has ended (at once if there is none)."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(descriptor, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def end_orphan(pid: int, number: signal.Signals, patience_s: float) -> None:
    """End a server that an earlier run left behind: `number`, then SIGKILL after `patience_s`."""
    for each, wait_s in ((number, patience_s), (signal.SIGKILL, KILL_S)):
        try:
            os.kill(pid, each)
        except ProcessLookupError:
            return
        try:
            async with asyncio.timeout(wait_s):
                await gone(pid)
                return
        except TimeoutError:
            continue


def running_with(argument: str, *, program: str) -> list[int]:
    """Processes that run `program` with `argument` (a path only we use) on their command line."""
    found = []
    for pid in _processes():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if Path(os.fsdecode(line[0])).name == program and os.fsencode(argument) in line:
            found.append(pid)
    return found


def working_in(directory: Path, *, program: str) -> list[int]:
    """Processes of the name `program` whose working directory is `directory`."""
    found = []
    for pid in _processes():
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == program and os.readlink(f"/proc/{pid}/cwd") == str(directory):
                found.append(pid)
        except OSError:
            continue
    return found


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def room(directory: Path, *, need_bytes: int = ROOM_BYTES) -> None:
    """Raises ServerRefusal(disk_full) when the file system of `directory` has less than `need_bytes` free."""
    free = shutil.disk_usage(directory).free
    if free < need_bytes:
        raise ServerRefusal(
            "disk_full",
            f"{directory} has {human_bytes(free)} free; the log needs at least {human_bytes(need_bytes)}.",
            "Make room there, or choose another data directory with --data.",
        )
