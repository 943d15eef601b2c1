"""The bus: one process's connection to NATS. Commands are asked here, beats published, events followed (`follower`)."""

import asyncio
import contextlib
import os
import zlib
from collections.abc import Callable
from typing import Final, NoReturn
from urllib.parse import urlsplit

import msgspec
import nats
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from controlplane import parties, subjects
from controlplane.answer import Answer, Reply
from controlplane.asker import Asker
from controlplane.commands import Order
from controlplane.fleet import Fleet, load
from controlplane.plane import Plane
from controlplane.refusal import Code, Refusal, Refused

ENCODING: Final = "Content-Encoding"
"""Header of a reply whose payload is compressed (`deflate`): a large state would pass NATS's payload limit."""
RETRY_MS: Final = 1000
PORT_POLL_S: Final = 0.02
PORT: Final = 4222

_encoder = msgspec.json.Encoder()
_replies: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
log = structlog.get_logger("bus")


class Bus:
    """A NATS connection that reconnects for ever. `nc` and `js` are open to use; `close` ends it."""

    def __init__(self, nc: Asker, name: str, party: str) -> None:
        """`party`: whose login to use, and so what may be said."""
        self.nc = nc
        self.party = party
        self.js: JetStreamContext = nc.jetstream(timeout=5)
        self.name = name
        self.closed = asyncio.Event()
        """Set once the connection is gone for good (closed here, or refused by the server)."""
        self.answered = 0
        """Position of the newest event that a command sent from here was answered with."""
        self._begun = False
        """Whether the client was asked to connect: before that it can't be closed."""
        self._on_reconnect: set[Callable[[], None]] = set()

    @staticmethod
    async def connect(plane: Plane, name: str, party: str, *, deadline_s: float = 30) -> "Bus":
        """Connect as `name`, with the login of `party`. Raises Refused(UNAVAILABLE) when the server has not answered after
        `deadline_s`."""
        bus = Bus(Asker(), name, party)
        await bus.open(plane, deadline_s=deadline_s)
        return bus

    async def open(self, plane: Plane, *, deadline_s: float | None) -> None:
        """Connect what was made unconnected; None: however long it takes. Until then commands are UNAVAILABLE."""
        try:
            async with asyncio.timeout(deadline_s):
                # The client sleeps for two seconds after a refused connection, so the port is waited for here.
                await _port(plane.nats_url)
                self._begun = True
                # A task of its own: the client's `wait_for` loses a cancellation that meets a connection (3.11), and goes on.
                login = plane.nats_login(self.party)
                connecting = asyncio.create_task(
                    self.nc.connect(
                        plane.nats_url, name=self.name, token=None if login else plane.nats_token,
                        user=login.user if login else None, password=login.password if login else None,
                        inbox_prefix=parties.inbox(self.party).encode(), max_reconnect_attempts=-1,
                        reconnect_time_wait=0.1,  # type: ignore[arg-type]
                        connect_timeout=5, ping_interval=5, max_outstanding_pings=2, error_cb=self._error,
                        reconnected_cb=self._reconnected, disconnected_cb=self._disconnected, closed_cb=self._closed,
                    )
                )  # fmt: skip
                connecting.add_done_callback(lambda done: done.cancelled() or done.exception())
                try:
                    await asyncio.shield(connecting)
                except BaseException:
                    await self._give_up(connecting)
                    raise
        except (TimeoutError, nats.errors.Error, OSError) as error:
            _unavailable(f"NATS at {plane.nats_url} does not answer within {deadline_s} s: {error!r}", error)

    async def _give_up(self, connecting: "asyncio.Task[None]") -> None:
        """Leave no connection behind that is half made."""
        await asyncio.sleep(0)  # a client that has not begun can't be closed
        while not connecting.done():
            connecting.cancel()
            await asyncio.wait([connecting], timeout=1)
        await self.close()

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer:
        """Ask the decider. Raises Refused: its refusal, or UNAVAILABLE when nobody answers in time.

        After UNAVAILABLE the command may or may not have been carried out; the same order (same id) can be sent
        again and gets its first answer.
        """
        try:
            payload = _encoder.encode(order)
        except UnicodeEncodeError as error:
            raise Refused(Code.INVALID, f"{order.id} holds half a character and can't be sent: {error}") from error
        reply = _replies.decode(await self._ask(subject, payload, timeout_s))
        if isinstance(reply, Refusal):
            raise Refused(reply.code, reply.message, retry_after_ms=reply.retry_after_ms, **reply.details)
        self.answered = max(self.answered, reply.position)
        return reply

    async def state(self, *, timeout_s: float = 5.0) -> Fleet:
        """Return the decider's committed state. Raises Refused(UNAVAILABLE)."""
        return load(await self._ask(subjects.ASK_STATE, b"", timeout_s))

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        """Send and forget, as JSON; dropped while the server is away (beats and progress are stale by then). Raises nothing."""
        if self.nc.is_connected:
            try:
                await self.nc.publish(subject, _encoder.encode(message))
            except (nats.errors.Error, OSError) as error:
                log.warning("not_published", bus=self.name, subject=subject, error=repr(error))

    async def connected(self, *, timeout_s: float) -> None:
        """Wait until the connection stands. Raises Refused(UNAVAILABLE)."""
        if self.nc.is_connected:
            return
        try:
            async with asyncio.timeout(timeout_s):
                while not self.nc.is_connected:  # noqa: ASYNC110 (the client offers a callback, not an event, and may flap)
                    await asyncio.sleep(PORT_POLL_S)
        except TimeoutError as error:
            _unavailable(f"the bus is away for more than {timeout_s:g} s", error)

    def on_reconnect(self, call: Callable[[], None]) -> Callable[[], None]:
        """Have `call` called after every reconnection; returns what undoes that."""
        self._on_reconnect.add(call)
        return lambda: self._on_reconnect.discard(call)

    async def answers(self, deadline_s: float) -> bool:
        """Whether the server answers on this connection."""
        # A task of its own, as in `open`: the client's `wait_for` loses a cancellation that meets the answer (3.11).
        asking = asyncio.create_task(self.nc.flush(deadline_s))
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(asking)
        except (nats.errors.Error, TimeoutError, OSError):
            return False
        finally:
            asking.cancel()
        return self.nc.is_connected  # the client's flush is content with less while it reconnects

    async def close(self) -> None:
        """Close in order; what was published is flushed first."""
        if self.nc.is_connected:
            with contextlib.suppress(nats.errors.Error, TimeoutError, OSError):
                await self.nc.flush(1)
        try:
            if self._begun:
                await self.nc.close()
        except OSError as error:  # the client was just reconnecting
            log.info("bus_close_failed", bus=self.name, error=repr(error))
        self.closed.set()

    async def _ask(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        await self.connected(timeout_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self.nc.request(subject, payload, timeout=None)
        except nats.errors.NoRespondersError as error:
            _unavailable("the decider, which admits and records, is not listening: it is being started", error)
        except nats.errors.MaxPayloadError as error:  # to ask again would not make it smaller
            message = f"{len(payload)} bytes for {subject}; the bus takes {self.nc.max_payload} in one message"
            raise Refused(Code.INVALID, message) from error
        except (nats.errors.Error, TimeoutError, OSError) as error:
            _unavailable(f"the decider did not answer on {subject} within {timeout_s:g} s", error)
        if (reply.headers or {}).get(ENCODING) == "deflate":
            return zlib.decompress(reply.data)
        return reply.data

    async def _error(self, error: Exception) -> None:
        log.warning("bus_error", bus=self.name, error=repr(error))

    async def _disconnected(self) -> None:
        log.info("bus_disconnected", bus=self.name)

    async def _reconnected(self) -> None:
        log.info("bus_reconnected", bus=self.name)
        for call in tuple(self._on_reconnect):
            call()

    async def _closed(self) -> None:
        self.closed.set()


async def give_pulse(message: Msg) -> None:
    """Answer who asks whether this process lives."""
    await message.respond(str(os.getpid()).encode())


async def _port(url: str) -> None:
    """Wait until something accepts on the URL's address. The caller sets the deadline."""
    parts = urlsplit(url)
    while True:
        try:
            _, writer = await asyncio.open_connection(parts.hostname or "127.0.0.1", parts.port or PORT)
        except OSError:
            await asyncio.sleep(PORT_POLL_S)
            continue
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return


def _unavailable(message: str, cause: BaseException) -> NoReturn:
    raise Refused(Code.UNAVAILABLE, message, retry_after_ms=RETRY_MS) from cause
