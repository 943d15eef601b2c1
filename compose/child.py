"""One supervised child process: started, adopted, restarted with back-off, stopped."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
import structlog

from compose.process import Identity, end, tether

BACK_OFF_S: Final = (0.1, 5.0)
"""First and longest pause between an end and the next start; doubled each time."""
STEADY_S: Final = 10.0
"""A process that lived this long was well: the next pause is the first one again."""
READY_POLL_S: Final = 0.01
ADOPT_S: Final = 3.0
"""A survivor that doesn't answer within this is no use and is ended."""

log = structlog.get_logger("supervisor")


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = {}
    """Added to our own."""
    prepare: Callable[[], None] | None = None
    """Called before each start (e.g. to remove what a crash left behind)."""
    ready: Callable[[], Awaitable[bool]] | None = None
    """Whether it does its work; None: it does as soon as it runs."""
    survives: bool = False
    """It outlives a killed `up`, whose successor adopts it; else it gets `stop_signal` when `up` dies."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_s: float = 6.0
    user: tuple[int, int] | None = None
    """uid and gid to run as, when `up` is root."""


State = Literal["starting", "ready", "waiting", "stopped"]


class ChildState(msgspec.Struct, frozen=True, kw_only=True):
    """What `status` shows of a child. `waiting`: it ended by itself and is started again after a pause."""

    name: str
    state: State
    pid: int | None
    since_ms: int
    restarts: int
    last_exit: str = ""


class Child:
    """Keeps one process running until `stop`. `changed` is called whenever `state` is another."""

    def __init__(self, spec: ChildSpec, data: Path, changed: Callable[[], None]) -> None:
        self.spec = spec
        self.restarts = 0
        self.adopted = False
        self._changed = changed
        self._log = data / "logs" / f"{spec.name}.log"
        self._pid_file = data / "run" / "pids" / f"{spec.name}.json"
        self._popen: subprocess.Popen[bytes] | None = None
        self._process: Identity | None = None
        self._state: State = "starting"
        self._since_ms = time.time_ns() // 1_000_000
        self._last_exit = ""
        self._stopping = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ChildState:
        return ChildState(
            name=self.spec.name, state=self._state, pid=self._process.pid if self._process else None,
            since_ms=self._since_ms, restarts=self.restarts, last_exit=self._last_exit,
        )  # fmt: skip

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"child {self.spec.name}")

    async def ready(self, deadline_s: float | None) -> bool:
        """Wait until it does its work, over restarts; False when the deadline came first."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready.wait(), deadline_s)
        return self._ready.is_set()

    async def stop(self) -> bool:
        """End it for good, by force after `stop_s`. False when force was needed."""
        self._stopping.set()
        late: list[Identity] = []
        if self._process is not None:
            late = await end([self._process], deadline_s=self.spec.stop_s, number=self.spec.stop_signal)
        if self._task is not None:
            await self._task
        if self._process is not None:  # it was being adopted just then
            late += await end([self._process], deadline_s=self.spec.stop_s, number=self.spec.stop_signal)
        if self._popen is not None:
            self._popen.wait()  # it has ended: this only takes it out of the process table
        self._pid_file.unlink(missing_ok=True)
        self._process = None
        self._enter("stopped")
        return not late

    def last_words(self, lines: int = 12) -> str:
        """The end of its log file."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    async def _run(self) -> None:
        pause = BACK_OFF_S[0]
        await self._take_over()
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                process = self._process or self._spawn()
            except OSError as error:
                self._last_exit = f"can't be started: {error}"
            else:
                watch = asyncio.create_task(self._watch_ready())
                await process.ended()
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
                self._last_exit = self._reap()
            self._ready.clear()
            self._process = None
            if self._stopping.is_set():
                return
            self.restarts += 1
            pause = BACK_OFF_S[0] if time.monotonic() - began > STEADY_S else pause
            log.warning("child_ended", child=self.spec.name, exit=self._last_exit, again_in_s=pause)
            self._enter("waiting")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
            pause = min(pause * 2, BACK_OFF_S[1])

    async def _take_over(self) -> None:
        """Adopt the process that an earlier `up` left, or end it when it is no use."""
        left = left_over(self._pid_file)
        if left is None:
            return
        if self.spec.survives and self.spec.ready is not None:
            with contextlib.suppress(TimeoutError):
                if await asyncio.wait_for(self.spec.ready(), ADOPT_S):
                    self.adopted, self._process = True, left
                    log.info("child_adopted", child=self.spec.name, pid=left.pid)
                    return
        log.info("child_left_over", child=self.spec.name, pid=left.pid)
        await end([left], deadline_s=self.spec.stop_s, number=self.spec.stop_signal)

    def _spawn(self) -> Identity:
        if self.spec.prepare is not None:
            self.spec.prepare()
        us, spec = os.getpid(), self.spec
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            user = {"user": spec.user[0], "group": spec.user[1], "extra_groups": []} if spec.user else {}
            self._popen = subprocess.Popen(
                spec.argv, stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, start_new_session=True, umask=0o077,
                env=os.environ | spec.environment, cwd="/",
                # After the fork it only calls prctl and getppid, which take no lock.
                preexec_fn=None if spec.survives else lambda: tether(us, spec.stop_signal),  # noqa: PLW1509
                **user,  # type: ignore[call-overload]
            )  # fmt: skip
        finally:
            os.close(descriptor)
        assert self._popen is not None
        self._process = process = Identity.of(self._popen.pid) or Identity(pid=self._popen.pid, started=0)
        try:
            self._pid_file.write_bytes(msgspec.json.encode(process))
        except OSError as error:  # a full disk: it runs all the same, and must not be started once more
            log.error("pid_not_kept", child=spec.name, pid=process.pid, error=str(error))
        self._enter("starting")
        return process

    async def _watch_ready(self) -> None:
        while self.spec.ready is not None and not await self.spec.ready():  # noqa: ASYNC110 (asks another process)
            await asyncio.sleep(READY_POLL_S)
        self._ready.set()
        self._enter("ready")

    def _reap(self) -> str:
        if self._popen is None:
            return "ended (an earlier process's child: its exit code is not ours to see)"
        code = self._popen.wait()
        self._popen = None
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _enter(self, state: State) -> None:
        self._state, self._since_ms = state, time.time_ns() // 1_000_000
        self._changed()


def left_over(pid_file: Path) -> Identity | None:
    """The process that a pid file names, if it is still that one and alive."""
    try:
        left = msgspec.json.decode(pid_file.read_bytes(), type=Identity)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return left if left.alive else None
