"""The holder's end of `control.sock`: the engine connects, is told one thing at a time, answers each once."""

import asyncio
import socket
from pathlib import Path

import msgspec

from pool.wire import REPLY_LIMIT, AsyncChannel
from worker.engines.messages import ControlCommand, ControlReply
from worker.engines.wire import decoder

_BODY_S = 5.0
"""Once a reply has begun, the rest of it is written already."""


class NotTold(Exception):
    """A command had no answer. `code`: `engine_died`, `not_connected` or `step_deadline`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class EnginePort:
    """One engine's connection; the next one is taken when that has ended."""

    def __init__(self) -> None:
        self._replies: msgspec.msgpack.Decoder[ControlReply] = decoder(ControlReply)
        self._channel: AsyncChannel | None = None
        self._awaited: asyncio.Future[ControlReply] | None = None
        self._turn = asyncio.Lock()

    @property
    def connected(self) -> bool:
        return self._channel is not None

    async def listen(self, path: Path) -> None:
        """Accept engines on `path` until cancelled."""
        path.unlink(missing_ok=True)  # noqa: ASYNC240 (of a holder that was killed here)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as server:
            server.bind(str(path))
            server.listen(2)
            loop = asyncio.get_running_loop()
            while True:
                connection, _ = await loop.sock_accept(server)
                self._channel = AsyncChannel(connection)
                try:
                    await self._read(self._channel)
                finally:
                    self.lose("not_connected", "the engine closed its connection before it answered")
                    connection.close()

    async def _read(self, channel: AsyncChannel) -> None:
        try:
            while (reply := await channel.receive(self._replies, REPLY_LIMIT, _BODY_S)) is not None:
                if self._awaited is not None and not self._awaited.done():
                    self._awaited.set_result(reply)
        except (OSError, TimeoutError):
            pass  # a broken stream is a lost connection; the engine connects again, or is dead and reaped

    def lose(self, code: str, message: str) -> None:
        """Forget the connection; a command that waits for its answer gets this one."""
        if self._channel is not None:
            self._channel.cut()
            self._channel = None
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_exception(NotTold(code, message))

    async def tell(self, command: ControlCommand, deadline_s: float) -> ControlReply:
        """Pass a command on and return its answer. Raises NotTold.

        Answers carry no number, so a command waits for the answer of one that outlasted its own deadline.
        """
        name = type(command).__name__
        try:
            async with asyncio.timeout(deadline_s), self._turn:
                if self._awaited is not None and not self._awaited.done():
                    await asyncio.wait([self._awaited])
                if self._channel is None:
                    raise NotTold("not_connected", f"the engine is not connected; {name} was not sent")
                self._awaited = asyncio.get_running_loop().create_future()
                self._awaited.add_done_callback(_seen)
                await self._channel.send(command)
                return await asyncio.shield(self._awaited)
        except TimeoutError:
            raise NotTold("step_deadline", f"the engine did not answer {name} within {deadline_s:g} s") from None
        except OSError as error:
            raise NotTold("not_connected", f"{name} could not be sent: {error}") from error


def _seen(answer: asyncio.Future[ControlReply]) -> None:
    """An answer that came after its deadline has no reader: take the exception off its hands."""
    if not answer.cancelled():
        answer.exception()
