"""The engine's process as its holder has it: started, ended, reaped, written to disk and brought back."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from worker import namespaces, processes, tether
from worker.census import Census
from worker.engineport import EnginePort, NotTold
from worker.holdermessages import Denied, Dump, Restore
from worker.images.surgery import Surgery, SurgeryFailed, children
from worker.instancedir import Exit, InstanceDir
from worker.processes import Process

KILL_S: Final = 5.0
"""From SIGKILL to the end: freeing tens of GiB takes a second or two; beyond that the kernel is stuck and we can't help."""
ENVIRONMENT: Final = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS",
    "COVERAGE_PROCESS_START", "ENGINEHOUSE_PLANE",
)  # fmt: skip
"""What an engine inherits: nothing secret, nothing of an instance; the last one says which plane it belongs to."""


class EngineProcess:
    """One holder's. Its caller calls `reap` on SIGCHLD.

    Attributes:
        known: the engine as the machine knows it, dead or alive; None: never started, or on disk.
        inner: the same process by its pid in the holder's own pid namespace.
        exit: how it ended, unless its end was meant (`dump`).
    """

    def __init__(self, directory: InstanceDir, census: Census, port: EnginePort) -> None:
        self._directory, self._census, self._port = directory, census, port
        self._surgery = Surgery(directory, census)
        self._operation = asyncio.Lock()
        """Held while CRIU works, or is about to."""
        self._replaceable = False
        self._reaped = asyncio.Event()
        self._ended: Exit | None = None
        """How an engine ended whose end was meant, or seemed to be."""
        self.known: Process | None = None
        self.inner: Process | None = None
        self.exit: Exit | None = None

    @property
    def idle(self) -> bool:
        """Nothing lives here."""
        return (self.known is None or self.exit is not None) and not self._operation.locked()

    @property
    def place(self) -> Path:
        """The instance's directory, as the engine sees it."""
        return self._surgery.place

    @property
    def park_in(self) -> Path | None:
        """Where the engine waits for its release once it is parked; None: there is no engine."""
        return self._surgery.park_in(self.inner.pid) if self.inner else None

    @property
    def death(self) -> str | None:
        """How it ended, in words; None: it has not, or it was meant."""
        if self.exit is None:
            return None
        status = self.exit.status
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"the engine's process ended with {how}"

    def start(self, argv: tuple[str, ...]) -> Denied | None:
        if self._operation.locked():
            return Denied(code="started_already", message="an engine is being brought back, or written to disk")
        if (denied := self._begin()) is not None:
            return denied
        try:
            self._know(self._spawn(argv))
        except OSError as error:
            return Denied(code="start_failed", message=f"{argv[0]} can't be run: {error}")
        return None

    def _spawn(self, argv: tuple[str, ...]) -> int:
        log = os.open(self._directory.engine_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if self._census.apart:
                namespaces.begin_pids_at(namespaces.FIRST_PID)
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ} | {"PYTHONUNBUFFERED": "1"},
                preexec_fn=tether.dying_with_parent(),  # noqa: PLW1509 (this process has one thread)
            )  # fmt: skip
        finally:
            os.close(log)
        child.returncode = 0  # reaped by `reap`, not by this object
        return child.pid

    def _know(self, inner: int) -> None:
        self.inner = processes.identify(inner)
        self.known = self._census.outside(inner)
        self._directory.edit(engine=self.known)

    def _begin(self) -> Denied | None:
        """Make way for an engine. There is one in a holder's life; but one that was restored or parked may be followed by
        another, whatever it has died of."""
        if self.known is not None and not (self._replaceable and self.exit is not None):
            return Denied(code="started_already", message=f"an engine was started already, pid {self.known.pid}")
        self.known, self.inner, self.exit, self._ended, self._replaceable = None, None, None, None, False
        self._surgery.parked = None
        self._reaped.clear()
        return None

    @property
    def parked(self) -> bool:
        """Whether it waits for its release."""
        return self._surgery.parked is not None and self.known is not None and self.exit is None

    async def park(self, deadline_s: float) -> Denied | None:
        if self.inner is None or self.exit is not None:
            return Denied(code="engine_died", message="there is no engine")
        try:
            await self._surgery.park(self._port, self.inner.pid, deadline_s)
        except (NotTold, SurgeryFailed) as failure:
            return Denied(code=failure.code, message=failure.message)
        return None

    def release(self) -> Denied | None:
        if not self.parked:
            return Denied(code="not_parked", message="no engine waits for its release")
        self._replaceable = True
        self._surgery.release()
        return None

    async def dump(self, wanted: Dump) -> Denied | None:
        async with self._operation:
            return await self._dump(wanted)

    async def _dump(self, wanted: Dump) -> Denied | None:
        if self.known is None or self.inner is None or self.exit is not None:
            return Denied(code="engine_died", message="there is no engine")
        before, self.known = self.known, None  # its end is meant now: `reap` must not take it for a death
        try:
            await self._surgery.dump(self._port, self.inner.pid, wanted)
        except (NotTold, SurgeryFailed) as failure:
            self.known = before
            if self._ended is not None:  # it was one after all
                self._over(self._ended)
                self.reap()
            return Denied(code=failure.code, message=failure.message)
        self.inner = None
        self._reaped.set()
        with contextlib.suppress(OSError):  # the dump took all room: a record of one that has ended misleads nobody
            self._directory.edit(engine=None)
        return None

    async def restore(self, wanted: Restore) -> Denied | None:
        async with self._operation:
            return await self._restore(wanted)

    async def _restore(self, wanted: Restore) -> Denied | None:
        if (denied := self._begin()) is not None:
            return denied
        try:
            await self._surgery.restore(wanted)
        except SurgeryFailed as failure:
            return Denied(code=failure.code, message=failure.message)
        self._know(wanted.pid)
        self._replaceable = True
        if not wanted.parked:
            self._surgery.release()
        return None

    async def kill(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s` seconds (0: at once); return when it and what it left behind are reaped.

        What CRIU is at is given up, so that nothing comes to life behind this.
        """
        self._surgery.stop()
        if self.inner is None:
            async with self._operation:
                pass
        engine = self.inner
        if engine is None or self.exit is not None:
            return
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            if wait_s == 0:
                continue
            processes.send(engine, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._reaped.wait()
                    return

    def reap(self) -> None:
        """Take every child's exit; once the engine has gone, end what it left behind."""
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = reaped
                self._surgery.reaped(pid, status)
                if self.inner is not None and pid == self.inner.pid and self.exit is None:
                    self._over(Exit(os.waitstatus_to_exitcode(status), time.time_ns() // 1_000_000))
        if self.exit is not None:
            left = children()
            for pid in left:  # ours and not reaped, so the pid can't mean another
                os.kill(pid, signal.SIGKILL)
            if not left:
                self._reaped.set()

    def _over(self, ended: Exit) -> None:
        self._ended = ended
        if self.known is None:  # its end is meant
            return
        self.exit, self._replaceable = ended, self._replaceable or self._surgery.parked is not None
        with contextlib.suppress(OSError):  # the worker has cleaned up, or the disk is full: whoever asks is told
            self._directory.edit(exit=ended)
        self._port.lose("engine_died", self.death or "")
