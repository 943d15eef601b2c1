"""The worker's side of a holder: start one, ask it. One short connection a question, so nothing is ever half read."""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pool.wire import AsyncChannel
from worker import processes
from worker.countdown import within
from worker.engines.messages import ControlCommand, ControlReply
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
from worker.locks import Cells
from worker.processes import Process
from worker.spare import Spare

ANSWER_S = 5.0
"""Of a holder that only has to look at itself."""
END_S = 12.0
"""Of one that ends its engine: it gives the kernel five seconds, and as long to what a restore has begun."""
POLL_S = 0.002
FOLLOW_S = 1.0
"""From the end of a spare one that was told whose it is to the answer of whom it went ahead of: else it has died, and another
is started. That takes some ms; and where it took longer on a busy machine, the other one steps back."""
REPLY_LIMIT = 1 << 20


class HolderGone(Exception):
    """The holder does not answer: it is dead, or was never there."""


class HolderDenied(Exception):
    """The holder's typed no; `code` as in `holdermessages`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class HolderLink:
    """Questions to one instance's holder. Each raises HolderGone, or HolderDenied with the holder's reason."""

    def __init__(self, directory: InstanceDir) -> None:
        self._directory = directory
        self._decoder: msgspec.msgpack.Decoder[HolderReply] = msgspec.msgpack.Decoder(HolderReply)

    async def open(
        self, *, deadline_s: float, linger_s: float | None = None, warden: bool = False, spare: Spare | None = None
    ) -> tuple[Process, Held]:
        """Start a holder, or have the spare one be it, and wait until one answers; return who answers, and how things stand.
        `warden`: see `warden.py`.

        When another holder has the directory (an earlier worker started it), the new one steps back and that one answers.
        In namespaces, or below a warden, the process that is started only goes ahead of the holder and ends at once.
        """
        argv = [sys.executable, "-P", "-m", "worker.holder", "--instance-dir", str(self._directory.path)]
        argv += ["--linger-s", str(linger_s)] if linger_s is not None else []
        argv += ["--warden"] if warden else []
        taken = spare.take(argv) if spare is not None else None
        started = taken or self._spawn(argv)
        try:
            async with asyncio.timeout(deadline_s):
                while (held := await self._first_answer(taken)) is None:
                    await processes.gone(started)
                    taken, started = None, self._spawn(argv)
        except TimeoutError:
            raise HolderGone(f"the holder did not answer within {deadline_s:g} s of its start") from None
        if held.pid != started.pid:
            await processes.gone(started, ANSWER_S)
        holder = processes.identify(held.pid)
        if holder is None:
            raise HolderGone(f"the holder (pid {held.pid}) ended at once")
        return holder, held

    def _spawn(self, argv: Sequence[str]) -> Process:
        return processes.spawn(argv, log=self._directory.log("holder"), directory=self._directory.path.parent)

    async def _first_answer(self, taken: Process | None) -> Held | None:
        """However long it takes; None: `taken` has ended, and nobody has followed it."""
        ended: float | None = None
        while ended is None or time.monotonic() - ended < FOLLOW_S:
            try:
                return await self.ask()
            except HolderGone:
                await asyncio.sleep(POLL_S)
            if ended is None and taken is not None and not processes.alive(taken):
                ended = time.monotonic()
        return None

    async def ask(self, *, deadline_s: float = ANSWER_S) -> Held:
        return await self._held(Ask(), deadline_s=deadline_s)

    async def start(self, argv: tuple[str, ...]) -> Held:
        return await self._held(Start(argv=argv))

    async def take_cells(self, grant: int, cells: Cells) -> Held:
        """Hand locked cells on. Our own copies stay the caller's to close."""
        return await self._held(TakeCells(grant=grant, shares=cells.shares), cells.descriptors)

    async def drop_cells(self) -> Held:
        return await self._held(DropCells())

    async def park(self, *, deadline_s: float) -> Held:
        return await self._held(ParkEngine(deadline_ms=round(deadline_s * 1000)), deadline_s=2 * deadline_s + ANSWER_S)

    async def release(self) -> Held:
        return await self._held(Release())

    async def dump(self, criu: str, directory: Path, *, deadline_s: float) -> Held:
        wanted = Dump(criu=criu, directory=str(directory), deadline_ms=round(deadline_s * 1000))
        return await self._held(wanted, deadline_s=2 * deadline_s + ANSWER_S)

    async def restore(
        self, criu: str, directory: Path, *, pid: int, place: str, deadline_s: float, parked: bool = False
    ) -> Held:
        wanted = Restore(
            criu=criu, directory=str(directory), pid=pid, place=place, deadline_ms=round(deadline_s * 1000), parked=parked
        )
        return await self._held(wanted, deadline_s=deadline_s + 2 * ANSWER_S)

    async def kill(self, grace_s: float) -> Held:
        return await self._held(Kill(grace_ms=round(grace_s * 1000)), deadline_s=grace_s + END_S)

    async def leave(self) -> Held:
        return await self._held(Leave(), deadline_s=END_S)

    async def tell(self, command: ControlCommand, deadline_s: float) -> ControlReply:
        """Pass a command to the engine; its answer may be a `Fault`."""
        match reply := await self._exchange(Tell(command=command, deadline_ms=round(deadline_s * 1000)), deadline_s + ANSWER_S):
            case Told(reply=answer):
                return answer
            case _:
                raise _unexpected(reply)

    async def _held(self, request: HolderRequest, descriptors: tuple[int, ...] = (), deadline_s: float = ANSWER_S) -> Held:
        match reply := await self._exchange(request, deadline_s, descriptors):
            case Held():
                return reply
            case _:
                raise _unexpected(reply)

    async def _exchange(self, request: HolderRequest, deadline_s: float, descriptors: tuple[int, ...] = ()) -> HolderReply:
        try:
            async with within(deadline_s):
                channel = await AsyncChannel.connect(str(self._directory.holder_socket))
                try:
                    await channel.send(request)
                    if descriptors:
                        await channel.send_fds(descriptors)
                    reply = await channel.receive(self._decoder, REPLY_LIMIT, ANSWER_S)
                finally:
                    channel.close()
        except TimeoutError:
            raise HolderGone(f"the holder did not answer {type(request).__name__} within {deadline_s:g} s") from None
        except OSError as error:
            raise HolderGone(f"the holder is not there: {error}") from error
        if reply is None:
            raise HolderGone(f"the holder ended before it answered {type(request).__name__}")
        return reply


def _unexpected(reply: HolderReply) -> Exception:
    if isinstance(reply, Denied):
        return HolderDenied(reply.code, reply.message)
    return HolderDenied("protocol", f"the holder answered {type(reply).__name__}")
