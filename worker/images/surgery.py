"""What a holder does to its engine with CRIU: out to disk, and back from there."""

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from worker import namespaces, processes
from worker.census import Census
from worker.engineport import EnginePort
from worker.engines.messages import Fault, Park
from worker.engines.parking import RELEASE
from worker.failure import FULL
from worker.holdermessages import Dump, Restore
from worker.images import criu
from worker.instancedir import InstanceDir

POLL_S: Final = 0.002
REAP_S: Final = 5.0
DRAFT: Final = f"{RELEASE}.new"
NO_RELEASE: Final = "no_release"
"""A restore that was not begun, for the disk is full: nothing could have let the engine go on."""


class SurgeryFailed(Exception):
    """`code`: `dump_failed`, `no_space`, `restore_failed`, `no_release`, `pid_taken`, `step_deadline`, `unkillable` or the
    engine's own."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Surgery:
    """One holder's. Its caller reaps: `reaped` must be told of every child that has ended."""

    def __init__(self, directory: InstanceDir, census: Census) -> None:
        self._directory, self._census = directory, census
        self._awaited: dict[int, asyncio.Future[int]] = {}
        self.parked: Path | None = None
        """Where an engine waits for its release now."""

    @property
    def place(self) -> Path:
        """The instance's directory, as its engine sees it."""
        return namespaces.PLACE if self._census.apart else self._directory.path

    def park_in(self, pid: int) -> Path:
        """Where engine `pid` waits for its release. Without namespaces no two engines have one pid, so it names the place."""
        return namespaces.PLACE if self._census.apart else self._run / "parked" / str(pid)

    @property
    def _run(self) -> Path:
        return self._directory.path.parent.parent

    def reaped(self, pid: int, status: int) -> None:
        if (awaited := self._awaited.pop(pid, None)) is not None and not awaited.done():
            awaited.set_result(os.waitstatus_to_exitcode(status))

    async def park(self, port: EnginePort, pid: int, deadline_s: float) -> None:
        """Raises SurgeryFailed or NotTold; then the engine is as it was before, or dead."""
        place = self.park_in(pid)
        self._make_way(place, full="no_space", failed="dump_failed")
        reply = await port.tell(Park(place=str(place)), deadline_s)
        if isinstance(reply, Fault):
            raise SurgeryFailed(reply.code, reply.message)
        self.parked = place
        try:
            async with asyncio.timeout(deadline_s):
                while port.connected:  # noqa: ASYNC110 (the end of another process's socket)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            self.release()
            raise SurgeryFailed("step_deadline", f"the engine was not parked within {deadline_s:g} s") from None

    async def dump(self, port: EnginePort, pid: int, wanted: Dump) -> None:
        """Raises SurgeryFailed or NotTold; then the engine is as it was before (still parked, if it was), or dead."""
        deadline_s, images = wanted.deadline_ms / 1000, Path(wanted.directory)
        was_parked = self.parked is not None
        if not was_parked:
            await self.park(port, pid, deadline_s)
        try:
            _make(images)
            argv = criu.dump_argv(wanted.criu, pid, str(images), str(self._nothing()))
            await self._run_criu(argv, images / "dump.log", "dump_failed", deadline_s)
            await self._gone(pid)
        except SurgeryFailed:
            if not was_parked:
                self.release()
            raise
        self.parked = None

    async def restore(self, wanted: Restore) -> None:
        """Raises SurgeryFailed; then nothing of it is left, unless its code is `unkillable`."""
        log, work = self._directory.log("restore"), self._directory.path
        script, mark = work / "refill.sh", work / "refilled"
        mark.unlink(missing_ok=True)
        try:
            refilling = criu.refill_script(Path(wanted.directory), wanted.pid, script, mark)
        except OSError as error:  # this holder lives on
            raise _unwritten(script, error, full=NO_RELEASE, failed="restore_failed") from error
        argv = criu.restore_argv(
            wanted.criu, wanted.directory, str(work), str(self._nothing()), str(script) if refilling else ""
        )
        with self._turn() as first:
            if not first:
                raise SurgeryFailed("pid_taken", "another restore is under way on this node, and pids are shared by all")
            if processes.identify(wanted.pid) is not None:
                raise SurgeryFailed("pid_taken", f"pid {wanted.pid}, which the image needs, is another process's")
            # Not before: the pid's owner may be about to read its release there.
            self._make_way(Path(wanted.place), full=NO_RELEASE, failed="restore_failed")
            try:
                await self._run_criu(argv, log, "restore_failed", wanted.deadline_ms / 1000)
                if refilling and not mark.exists():
                    raise SurgeryFailed("restore_failed", "criu succeeded, and did not fill the memory")
                if wanted.pid not in children():
                    raise SurgeryFailed("restore_failed", f"criu succeeded, and there is no process {wanted.pid}")
            except SurgeryFailed as failure:
                await self._end_all(wanted.pid, failure)
                raise
        self.parked = Path(wanted.place)

    def stop(self) -> None:
        """Have what CRIU is at fail; whoever has asked for it hears so."""
        for pid in self._awaited:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # our own child, not reaped yet, and leader of its own group

    def release(self) -> None:
        """Tell the parked engine that it is this instance's."""
        place, self.parked = self.parked, None
        assert place is not None
        (place / DRAFT).replace(place / RELEASE)

    def _make_way(self, place: Path, *, full: str, failed: str) -> None:
        """A release that was left there would end the wait of the next one too early. What this one's will say is written now:
        a dump may leave no room for that. Raises SurgeryFailed."""
        try:
            _make(place)
            (place / RELEASE).unlink(missing_ok=True)
            (place / DRAFT).write_text(str(self.place), encoding="utf-8")
        except OSError as error:
            raise _unwritten(place / DRAFT, error, full=full, failed=failed) from error

    async def _run_criu(self, argv: list[str], log: Path, code: str, deadline_s: float) -> None:
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 (a fork; nothing is waited for)
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise SurgeryFailed(code, f"{argv[0]} can't be run: {error}") from error
        self._awaited[process.pid] = ended = asyncio.get_running_loop().create_future()
        process.returncode = 0  # reaped by the holder, not by this object
        await asyncio.wait((ended,), timeout=deadline_s)
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # our own child, not reaped yet, and leader of its own group
            await asyncio.wait((ended,), timeout=REAP_S)
            raise SurgeryFailed("step_deadline", f"criu did not end within {deadline_s:g} s: {criu.last_words(log)}")
        if (status := ended.result()) != 0:
            raise SurgeryFailed(code, f"criu ended with status {status}: {criu.last_words(log)}")

    async def _gone(self, pid: int) -> None:
        for _ in range(round(REAP_S / POLL_S)):
            if pid not in children():
                return
            await asyncio.sleep(POLL_S)
        raise SurgeryFailed("dump_failed", f"the engine (pid {pid}) outlived its dump")

    async def _end_all(self, engine: int, failure: SurgeryFailed) -> None:
        """End what a failed restore has left: all our children are its, and orphans of theirs become ours.

        Raises SurgeryFailed (`unkillable`) when one outlives SIGKILL; it is the instance's engine on record then, so that
        the instance is not cleared away while it is there.
        """
        for _ in range(round(REAP_S / POLL_S)):
            left = children()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(POLL_S)
        if left := children():
            self._directory.edit(engine=self._census.outside(engine if engine in left else left[0]))
            pids = ", ".join(map(str, left))
            raise SurgeryFailed(
                "unkillable",
                f"pid {pids} of a failed restore outlives SIGKILL by {REAP_S:g} s; it failed with: {failure.message}",
            ) from failure

    def _nothing(self) -> Path:
        """An empty directory."""
        nothing = self._run / "nothing"
        nothing.mkdir(mode=0o700, exist_ok=True)
        return nothing

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Where all share one pid namespace, one restore at a time."""
        if self._census.apart:
            yield True
            return
        lock = os.open(self._run / "restore.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(lock)


def _make(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _unwritten(path: Path, error: OSError, *, full: str, failed: str) -> SurgeryFailed:
    """Its code is `full` where the disk is."""
    code = full if error.errno in FULL else failed
    return SurgeryFailed(code, f"{path} can't be written: {error}")


def children() -> list[int]:
    """Pids of this process's children, dead ones that are not reaped included."""
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/self/task/{me}/children").read_text(encoding="ascii").split()]
