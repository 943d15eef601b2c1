"""The holder, one small process per instance: `python -m worker.holder --instance-dir DIR/run/inst/<id>`.

It is the engine's parent and the keeper of the cells' locks, and outlives the worker: a lock lives as long as the
process that uses the memory. It decides nothing. When it dies, the kernel kills the engine.
"""

import argparse
import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, assert_never

import msgspec

from pool.wire import AsyncChannel, close_all
from worker import namespaces, processes, tether
from worker.census import Census
from worker.engineport import EnginePort, NotTold
from worker.holdermessages import (
    Ask,
    Denied,
    DropCells,
    Dump,
    Held,
    HolderReply,
    HolderRequest,
    Kill,
    Leave,
    Restore,
    Start,
    TakeCells,
    Tell,
    Told,
)  # fmt: skip
from worker.images.surgery import Surgery, SurgeryFailed, children
from worker.instancedir import Exit, InstanceDir
from worker.processes import Process

LINGER_S: Final = 60.0
"""Without an engine, and without a worker that asks: longer than a worker takes to be started again."""
LOG_LIMIT: Final = 4 << 20
"""engine.log beyond this many bytes is cut: a failing engine may write for days."""
KILL_S: Final = 5.0
"""From SIGKILL to the end: freeing tens of GiB takes a second or two; beyond that the kernel is stuck and we can't help."""
LOOK_S: Final = 1.0
QUESTION_S: Final = 5.0
ENVIRONMENT: Final = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "OMP_NUM_THREADS",
    "COVERAGE_PROCESS_START", "ENGINEHOUSE_PLANE",
)  # fmt: skip
"""What an engine inherits: nothing secret, nothing of an instance; the last one says which plane it belongs to."""


class Holder:
    """State of one holder. `left` is set when it may exit."""

    def __init__(self, directory: InstanceDir, linger_s: float, census: Census) -> None:
        self._directory, self._linger_s, self._census = directory, linger_s, census
        self._port = EnginePort()
        self._surgery = Surgery(directory, census)
        self._engine: Process | None = None
        """As the machine knows it; `_inner` is the same process by its pid in here."""
        self._inner: Process | None = None
        self._restored = False
        self._exit: Exit | None = None
        self._reaped = asyncio.Event()
        self._cells: TakeCells | None = None
        self._locks: list[int] = []
        self._newest = 0
        self._asked = time.monotonic()
        self.left = asyncio.Event()

    async def serve(self) -> None:
        """Answer workers until told to leave, or until nobody needs this process any more."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self.left.set)
        tasks = {loop.create_task(self._port.listen(self._directory.control_socket)), loop.create_task(self._look())}
        tasks.add(loop.create_task(self._answer_all(tasks)))
        waiting = loop.create_task(self.left.wait())
        try:
            done, _ = await asyncio.wait({*tasks, waiting}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._kill(0)
            for task in (*tasks, waiting):
                task.cancel()
            self._drop()
            for path in (self._directory.holder_socket, self._directory.control_socket):
                path.unlink(missing_ok=True)

    async def _answer_all(self, tasks: set[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        path = self._directory.holder_socket
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as server:
            server.bind(str(path))
            server.listen(16)
            while True:
                connection, _ = await loop.sock_accept(server)
                task = loop.create_task(self._converse(AsyncChannel(connection)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _converse(self, channel: AsyncChannel) -> None:
        decoder: msgspec.msgpack.Decoder[HolderRequest] = msgspec.msgpack.Decoder(HolderRequest)
        self._asked = time.monotonic()
        with contextlib.suppress(OSError, TimeoutError):  # the worker went away; what was begun is finished all the same
            try:
                async with asyncio.timeout(QUESTION_S):
                    request = await channel.receive(decoder, 1 << 20, QUESTION_S)
                    locks = await channel.receive_fds(len(request.cells)) if isinstance(request, TakeCells) else []
                if request is not None:
                    await channel.send(await self._answer(request, locks))
            finally:
                channel.close()
                self._asked = time.monotonic()

    async def _answer(self, request: HolderRequest, locks: list[int]) -> HolderReply:
        match request:
            case Start(argv=argv):
                if (denied := self._begin()) is not None:
                    return denied
                try:
                    self._start(argv)
                except OSError as error:
                    return Denied(code="start_failed", message=f"{argv[0]} can't be run: {error}")
            case TakeCells():
                if (denied := self._take(request, locks)) is not None:
                    close_all(locks)
                    return denied
            case DropCells():
                self._drop()
            case Tell(command=command, deadline_ms=deadline_ms):
                if self._exit is not None:
                    return Denied(code="engine_died", message=_death(self._exit))
                try:
                    return Told(reply=await self._port.tell(command, deadline_ms / 1000))
                except NotTold as error:
                    return Denied(code=error.code, message=error.message)
            case Dump():
                if (denied := await self._dump(request)) is not None:
                    return denied
            case Restore():
                if (denied := await self._restore(request)) is not None:
                    return denied
            case Kill(grace_ms=grace_ms):
                await self._kill(grace_ms / 1000)
            case Leave():
                await self._kill(0)
                self._drop()
                asyncio.get_running_loop().call_soon(self.left.set)  # after the answer has gone out
            case Ask():
                pass
            case _:
                assert_never(request)
        return self._held()

    def _held(self) -> Held:
        cells = self._cells
        return Held(
            pid=self._census.pid, engine=self._engine, exit=self._exit, connected=self._port.connected and self._exit is None,
            grant=cells.grant if cells else None, device=cells.device if cells else None, cells=cells.cells if cells else (),
            place=str(self._surgery.place), inner_pid=self._inner.pid if self._inner else 0,
            park_in=str(self._surgery.park_in(self._inner.pid)) if self._inner else "",
        )  # fmt: skip

    def _start(self, argv: tuple[str, ...]) -> None:
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
        child.returncode = 0  # reaped by _reap, not by this object
        self._know(child.pid)

    def _know(self, inner: int) -> None:
        self._inner = processes.identify(inner)
        self._engine = self._census.outside(inner)
        self._directory.edit(engine=self._engine)

    def _begin(self) -> Denied | None:
        """Make way for an engine. There is one in a holder's life, but for a restored one that died: a cold one may follow."""
        if self._engine is not None and not (self._restored and self._exit is not None):
            return Denied(code="started_already", message=f"an engine was started already, pid {self._engine.pid}")
        self._engine, self._inner, self._exit, self._restored = None, None, None, False
        self._reaped.clear()
        return None

    async def _dump(self, wanted: Dump) -> Denied | None:
        if self._engine is None or self._inner is None or self._exit is not None:
            return Denied(code="engine_died", message="there is no engine")
        before, self._engine = self._engine, None  # its end is meant now: `_reap` must not take it for a death
        try:
            await self._surgery.dump(self._port, self._inner.pid, wanted)
        except NotTold as error:
            self._engine = before
            return Denied(code=error.code, message=error.message)
        except SurgeryFailed as failure:
            self._engine = before
            return Denied(code=failure.code, message=failure.message)
        self._inner = None
        self._directory.edit(engine=None)
        return None

    async def _restore(self, wanted: Restore) -> Denied | None:
        if (denied := self._begin()) is not None:
            return denied
        try:
            await self._surgery.restore(wanted)
        except SurgeryFailed as failure:
            return Denied(code=failure.code, message=failure.message)
        self._know(wanted.pid)
        self._restored = True
        self._surgery.release(Path(wanted.place))
        return None

    def _take(self, wanted: TakeCells, locks: list[int]) -> Denied | None:
        if wanted.grant < self._newest:
            return Denied(code="fenced", message=f"grant {wanted.grant} is older than {self._newest}, which was seen before")
        held = self._cells
        if held is not None and held != wanted:
            return Denied(
                code="holds_cells",
                message=f"cells {held.cells} of device {held.device} are held under grant {held.grant}; "
                f"drop them before grant {wanted.grant} is taken",
            )
        self._drop()
        self._cells, self._locks, self._newest = wanted, locks, wanted.grant
        return None

    def _drop(self) -> None:
        close_all(self._locks)
        self._cells, self._locks = None, []

    async def _kill(self, grace_s: float) -> None:
        engine = self._inner
        if engine is None or self._exit is not None:
            return
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            if wait_s == 0:
                continue
            processes.send(engine, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reaped.wait(), wait_s)
                return

    def _reap(self) -> None:
        """Take every child's exit; once the engine has gone, end what it left behind."""
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = reaped
                self._surgery.reaped(pid, status)
                if self._engine is not None and self._inner is not None and pid == self._inner.pid and self._exit is None:
                    self._exit = Exit(os.waitstatus_to_exitcode(status), time.time_ns() // 1_000_000)
                    with contextlib.suppress(FileNotFoundError):  # the worker has cleaned up: nobody is left to tell
                        self._directory.edit(exit=self._exit)
                    self._port.lose("engine_died", _death(self._exit))
        if self._exit is not None:
            left = children()
            for pid in left:  # ours and not reaped, so the pid can't mean another
                os.kill(pid, signal.SIGKILL)
            if not left:
                self._reaped.set()

    async def _look(self) -> None:
        """Once a second: is anybody still interested, has the log grown too long?"""
        while True:
            await asyncio.sleep(LOOK_S)
            idle = self._engine is None or self._exit is not None
            if (idle and time.monotonic() - self._asked > self._linger_s) or not self._directory.path.exists():
                self.left.set()
            self._directory.cut_log(LOG_LIMIT)


def _death(end: Exit) -> str:
    how = f"signal {signal.Signals(-end.status).name}" if end.status < 0 else f"exit status {end.status}"
    return f"the engine's process ended with {how}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="worker.holder")
    parser.add_argument("--instance-dir", type=Path, required=True)
    parser.add_argument("--linger-s", type=float, default=LINGER_S)
    options = parser.parse_args()
    directory = InstanceDir(options.instance_dir.parent, options.instance_dir.name)
    os.umask(0o077)
    lock = os.open(directory.path / "holder.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{directory.path} has a holder already", file=sys.stderr)  # noqa: T201
        return 3
    census = Census.before()
    if namespaces.enter(directory.path):
        census = census.inside()
    else:
        tether.become_subreaper()
    directory.edit(holder=census.myself)
    asyncio.run(Holder(directory, options.linger_s, census).serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
