"""One supervised child process: started, adopted, restarted with back-off, stopped."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog

from compose.childstate import ChildState, Shown, ending
from compose.nursery import Birth, Nursery
from compose.process import Identity, end, tether

BACK_OFF_S: Final = (0.1, 5.0)
"""First and longest pause between an end and the next start; doubled each time."""
STEADY_S: Final = 10.0
"""A process that lived this long was well: the next pause is the first one again."""
READY_POLL_S: Final = 0.01
SEEN_AGAIN_S: Final = 1.0
T = TypeVar("T")
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
    already: Callable[[], Identity | None] | None = None
    """Who does its work already, though no pid was kept: `up` was killed just as it had started it, or its disk was full."""
    stop_signal: signal.Signals = signal.SIGTERM
    stop_s: float = 6.0


class Child(Shown):
    """Keeps one process running until `stop`. `changed` is called whenever `state` is another."""

    def __init__(self, spec: ChildSpec, data: Path, changed: Callable[[], None], nursery: Nursery | None = None) -> None:
        """nursery: where its first process comes from, if that has one for it."""
        super().__init__(changed)
        self.spec = spec
        self._nursery = nursery
        self.adopted = False
        self._log = data / "logs" / f"{spec.name}.log"
        self._pid_file = data / "run" / "pids" / f"{spec.name}.json"
        self._ours: int | None = None
        self._process: Identity | None = None
        self._stopping = asyncio.Event()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.spec.name

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
            async with asyncio.timeout(deadline_s):
                await self._ready.wait()
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
        self._reap()  # it has ended: this only takes it out of the process table
        self._pid_file.unlink(missing_ok=True)
        self._process = None
        self._enter("stopped")
        return not late

    async def give_up(self, verdict: str) -> None:
        """Kill what runs: it is started again as when it had ended by itself. `verdict`: what is shown of its end."""
        if (process := self._process) is not None:
            self._verdict = verdict
            process.send(signal.SIGKILL)
            await process.ended(self.spec.stop_s)

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
                process = self._process or await self._begin()
            except OSError as error:
                self._last_exit = f"can't be started: {error}"
            else:
                watch = asyncio.create_task(self._watch_ready())
                await self._insist(process.ended)
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
                self._last_exit = self._ended(self._reap())
            self._ready.clear()
            self._process = None
            if self._stopping.is_set():
                return
            self.restarts += 1
            pause = BACK_OFF_S[0] if time.monotonic() - began > STEADY_S else pause
            log.warning("child_ended", child=self.spec.name, exit=self._last_exit, again_in_s=pause)
            self._enter("waiting")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            pause = min(pause * 2, BACK_OFF_S[1])

    async def _take_over(self) -> None:
        """Adopt the process that an earlier `up` left, or end it when it is no use."""
        left = left_over(self._pid_file)
        if left is None and self.spec.already is not None:
            left = self.spec.already()
        if left is None:
            return
        if self.spec.survives and self.spec.ready is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADOPT_S):
                    usable = await self._insist(self.spec.ready)
                if usable:
                    self._adopt(left)
                    return
        log.info("child_left_over", child=self.spec.name, pid=left.pid)
        await end([left], deadline_s=self.spec.stop_s, number=self.spec.stop_signal)

    def _adopt(self, left: Identity) -> None:
        self.adopted, self._process = True, left
        if self._nursery is not None:
            self._nursery.decline(self.spec.name)
        log.info("child_adopted", child=self.spec.name, pid=left.pid)

    async def _begin(self) -> Identity:
        """Start it. Raises OSError."""
        if self.spec.prepare is not None:
            self.spec.prepare()
        nursery, self._nursery = self._nursery, None
        pid = await self._born(nursery) if nursery is not None else None
        self._ours = pid = pid or self._spawn()
        self._process = process = Identity.of(pid) or Identity(pid, 0, "")
        try:
            self._pid_file.write_bytes(msgspec.json.encode(process))
        except OSError as error:  # a full disk: it runs all the same, and must not be started once more
            log.error("pid_not_kept", child=self.spec.name, pid=pid, error=str(error))
        self._enter("starting")
        if self._stopping.is_set():  # while we waited for the nursery
            await end([process], deadline_s=self.spec.stop_s, number=self.spec.stop_signal)
        return process

    async def _born(self, nursery: Nursery) -> int | None:
        spec = self.spec
        birth = Birth(
            argv=list(spec.argv), environment={**os.environ, **spec.environment}, log=str(self._log),
            tie=None if spec.survives else int(spec.stop_signal),
        )  # fmt: skip
        pid = await nursery.take(spec.name, birth)
        log.info("child_begins", child=spec.name, pid=pid, nursery=pid is not None)
        return pid

    def _spawn(self) -> int:
        us, spec = os.getpid(), self.spec
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            popen = subprocess.Popen(
                spec.argv, stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, start_new_session=True, umask=0o077,
                env=os.environ | spec.environment, cwd="/",
                # After the fork it only calls prctl and getppid, which take no lock.
                preexec_fn=None if spec.survives else lambda: tether(us, spec.stop_signal),  # noqa: PLW1509
            )  # fmt: skip
        finally:
            os.close(descriptor)
        popen.returncode = 0  # we wait for it ourselves (`_reap`), as for one that was born
        return popen.pid

    async def _watch_ready(self) -> None:
        while self.spec.ready is not None and not await self._insist(self.spec.ready):  # noqa: ASYNC110 (asks another process)
            await asyncio.sleep(READY_POLL_S)
        self._ready.set()
        self._enter("ready")

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Nobody else starts it again: nothing that goes wrong here, no more descriptors say, may be the end of its keeping."""
        while True:
            try:
                return await ask()
            except Exception:
                log.exception("child_not_seen", child=self.spec.name, again_in_s=SEEN_AGAIN_S)
                await asyncio.sleep(SEEN_AGAIN_S)

    def _reap(self) -> str:
        if self._ours is None:
            return "ended (an earlier process's child: its exit code is not ours to see)"
        code = os.waitstatus_to_exitcode(os.waitpid(self._ours, 0)[1])
        self._ours = None
        return ending(code)


def left_over(pid_file: Path) -> Identity | None:
    """The process that a pid file names, if it is still that one and alive."""
    try:
        left = msgspec.json.decode(pid_file.read_bytes(), type=Identity)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return left if left.alive else None
