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
import sys
import time
from pathlib import Path
from typing import Final, assert_never

import msgspec

from controlplane import commandline
from pool.wire import AsyncChannel, close_all
from worker import namespaces, tether, warden
from worker.census import Census
from worker.engineport import EnginePort, NotTold
from worker.engineprocess import EngineProcess
from worker.heldcells import HeldCells
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
    ParkEngine,
    Release,
    Restore,
    Start,
    TakeCells,
    Tell,
    Told,
)  # fmt: skip
from worker.instancedir import InstanceDir

LINGER_S: Final = 60.0
"""Without an engine, and without a worker that asks: longer than a worker takes to be started again."""
LOG_LIMIT: Final = 4 << 20
"""engine.log beyond this many bytes is cut: a failing engine may write for days."""
LOOK_S: Final = 1.0
QUESTION_S: Final = 5.0


class Holder:
    """State of one holder. `left` is set when it may exit."""

    def __init__(self, directory: InstanceDir, linger_s: float, census: Census) -> None:
        self._directory, self._linger_s, self._census = directory, linger_s, census
        self._port = EnginePort()
        self._engine = EngineProcess(directory, census, self._port)
        self._cells = HeldCells()
        self._asked = time.monotonic()
        self.left = asyncio.Event()

    async def serve(self) -> None:
        """Answer workers until told to leave, or until nobody needs this process any more."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._engine.reap)
        loop.add_signal_handler(signal.SIGTERM, self.left.set)
        tasks = {loop.create_task(self._port.listen(self._directory.control_socket)), loop.create_task(self._look())}
        tasks.add(loop.create_task(self._answer_all(tasks)))
        waiting = loop.create_task(self.left.wait())
        try:
            done, _ = await asyncio.wait({*tasks, waiting}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._engine.kill(0)
            for task in (*tasks, waiting):
                task.cancel()
            self._cells.drop()
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
                    locks = await channel.receive_fds(request.count) if isinstance(request, TakeCells) else []
                if request is not None:
                    await channel.send(await self._answer(request, locks))
            finally:
                channel.close()
                self._asked = time.monotonic()

    async def _answer(self, request: HolderRequest, locks: list[int]) -> HolderReply:
        match request:
            case Start(argv=argv):
                if (denied := self._engine.start(argv)) is not None:
                    return denied
            case TakeCells():
                if (denied := self._cells.take(request, locks)) is not None:
                    close_all(locks)
                    return denied
            case DropCells():
                self._cells.drop()
            case Tell(command=command, deadline_ms=deadline_ms):
                if (death := self._engine.death) is not None:
                    return Denied(code="engine_died", message=death)
                try:
                    return Told(reply=await self._port.tell(command, deadline_ms / 1000))
                except NotTold as error:
                    return Denied(code=error.code, message=error.message)
            case ParkEngine(deadline_ms=deadline_ms):
                if (denied := await self._engine.park(deadline_ms / 1000)) is not None:
                    return denied
            case Release():
                if (denied := self._engine.release()) is not None:
                    return denied
            case Dump():
                if (denied := await self._engine.dump(request)) is not None:
                    return denied
            case Restore():
                if (denied := await self._engine.restore(request)) is not None:
                    return denied
            case Kill(grace_ms=grace_ms):
                await self._engine.kill(grace_ms / 1000)
            case Leave():
                await self._engine.kill(0)
                self._cells.drop()
                asyncio.get_running_loop().call_soon(self.left.set)  # after the answer has gone out
            case Ask():
                pass
            case _:
                assert_never(request)
        return self._held()

    def _held(self) -> Held:
        engine, cells = self._engine, self._cells.now
        return Held(
            pid=self._census.pid, engine=engine.known, exit=engine.exit, connected=self._port.connected and engine.exit is None,
            grant=cells.grant if cells else None, shares=cells.shares if cells else (),
            place=str(engine.place), inner_pid=engine.inner.pid if engine.inner else 0, park_in=str(engine.park_in or ""),
            parked=engine.parked,
        )  # fmt: skip

    async def _look(self) -> None:
        """Once a second: is anybody still interested, has the log grown too long?"""
        while True:
            await asyncio.sleep(LOOK_S)
            if (self._engine.idle and time.monotonic() - self._asked > self._linger_s) or not self._directory.path.exists():
                self.left.set()
            try:
                self._directory.cut_log(LOG_LIMIT)
            except OSError as error:  # a disk that is full for a while is no reason to end an engine
                print(f"{self._directory.engine_log} could not be cut: {error}", file=sys.stderr)  # noqa: T201


def _awaited() -> list[str] | None:
    """What a spare holder's arguments are (see `spare.py`), once it is some instance's; None: it is nobody's."""
    if not (line := sys.stdin.buffer.readline()):
        return None
    argv = msgspec.json.decode(line, type=list[str])
    commandline.show(argv)
    return argv[argv.index("worker.holder") + 1 :]


def _settle_in(directory: InstanceDir) -> None:
    """Streams and directory of a spare one, as of a holder that was started for the instance."""
    os.chdir(directory.path.parent)
    log = os.open(directory.log("holder"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for opened, numbers in ((nothing, (0,)), (log, (1, 2))):
        for number in numbers:
            os.dup2(opened, number)
        os.close(opened)


def main() -> int:
    spare, argv = "--await" in sys.argv, sys.argv[1:]
    if spare:
        if (awaited := _awaited()) is None:
            return 0
        argv = awaited
    parser = argparse.ArgumentParser(prog="worker.holder")
    parser.add_argument("--instance-dir", type=Path, required=True)
    parser.add_argument("--linger-s", type=float, default=LINGER_S)
    parser.add_argument("--warden", action="store_true", help="without namespaces, have a process above end what is left here")
    options = parser.parse_args(argv)
    directory = InstanceDir(options.instance_dir.parent, options.instance_dir.name)
    os.umask(0o077)
    if spare:
        _settle_in(directory)
    lock = os.open(directory.path / "holder.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{directory.path} has a holder already", file=sys.stderr)  # noqa: T201
        return 3
    census, above = Census.before(), None
    if namespaces.enter(directory.path):
        census = census.inside()
    else:
        above = warden.enter(lock) if options.warden else None
        tether.become_subreaper()
    directory.edit(holder=census.myself, warden=above)
    asyncio.run(Holder(directory, options.linger_s, census).serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
