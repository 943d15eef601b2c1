"""Processes as they may be trusted: a pid counts only together with its start time and the kernel's boot id.

Signals go through a pidfd that was opened *before* the start time was compared, so a pid that is used again
is never hit. Nothing here signals a group or a name.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

_PROC = Path("/proc")


class Process(msgspec.Struct, frozen=True):
    """Who a process is. `started` is its start time in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    started: int
    boot: str


def boot_id() -> str:
    """The kernel's boot id; pids mean nothing across a change of it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state (field 3) on; None when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()  # the name in parentheses may hold anything, so cut after the last one


def identify(pid: int) -> Process | None:
    """Return who has this pid now, or None. A zombie still is somebody: it has not been reaped."""
    fields = _stat(pid)
    return Process(pid, int(fields[19]), boot_id()) if fields else None


def alive(process: Process) -> bool:
    """Whether exactly this process still runs; a zombie uses no memory any more and counts as gone."""
    fields = _stat(process.pid)
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == process.started and process.boot == boot_id()


def _open(process: Process) -> int | None:
    """A pidfd of exactly this process, or None when it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    same = False
    try:
        known = identify(process.pid)
        same = known is not None and (known.started, known.boot) == (process.started, process.boot)
    finally:  # also where no other descriptor is left to look with: this one would be missing for ever
        if not same:
            os.close(descriptor)
    return descriptor if same else None


def send(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this process. False: it is gone."""
    if (descriptor := _open(process)) is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


async def gone(process: Process, deadline_s: float | None = None) -> bool:
    """Wait for the process's end and, if it is our child, reap it. False: it still ran after `deadline_s` (None: for ever)."""
    over = await ended(process, deadline_s)
    if over:
        reap(process)
    return over


async def ended(process: Process, deadline_s: float | None = None) -> bool:
    """Wait for the process's end, and leave it to its parent to reap it. False: it still ran after `deadline_s`."""
    if (descriptor := _open(process)) is None:
        return True
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, over.set)
    try:
        async with asyncio.timeout(deadline_s):
            await over.wait()
    except TimeoutError:
        return not alive(process)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True


def reap(process: Process) -> None:
    """Of a child of ours that has ended, if it is one and has."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


async def end(process: Process, *, grace_s: float, deadline_s: float = 5.0) -> bool:
    """SIGTERM, then SIGKILL after `grace_s`; wait until it is gone. False: not even SIGKILL ended it within `deadline_s`."""
    if grace_s > 0 and send(process, signal.SIGTERM) and await gone(process, grace_s):
        return True
    send(process, signal.SIGKILL)
    return await gone(process, deadline_s)


def spawn(argv: Sequence[str], *, log: Path, directory: Path, stdin: int = subprocess.DEVNULL) -> Process:
    """Start a process in a session of its own, output appended to `log`; whoever waits with `gone` reaps it. Raises OSError."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(
            list(argv), stdin=stdin, stdout=descriptor, stderr=descriptor, start_new_session=True, cwd=directory
        )
    finally:
        os.close(descriptor)
    child.returncode = 0  # we reap by pidfd; without this the object would try to, and warn when it is collected
    process = identify(child.pid)
    if process is None:  # can't be: it is our child and nobody has reaped it
        raise ProcessLookupError(child.pid)
    return process


def in_session(leader: int) -> Iterator[Process]:
    """Every live process whose session was begun by pid `leader`: what an engine may have started and left behind."""
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        fields = _stat(int(entry.name))
        if fields and fields[0] not in "ZX" and int(fields[3]) == leader:
            yield Process(int(entry.name), int(fields[19]), boot_id())


def private_bytes(pid: int) -> int:
    """Anonymous resident bytes of a process: what it alone keeps in memory. 0: it is gone.

    smaps' "private" is another thing: it counts the pool's pages, too, as long as one process alone maps them.
    """
    try:
        resident, shared = (_PROC / str(pid) / "statm").read_text(encoding="ascii").split()[1:3]
    except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
