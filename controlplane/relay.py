"""The relay: the log's copy on JetStream, where followers read. Sequence n of the stream is event n.

It keeps no cursor. At every (re)connection it asks the stream for its last sequence and sends the rest out of the table,
each message with the sequence that must precede it, so two relays can't write twice and nothing is skipped:

    look --> lost or other than the table? delete and make anew --> send the table's rest --> send what the desk feeds
      ^                                                                                            |
      +------------------------------ any refusal, silence or reconnection -----------------------+

The desk hands it each commit directly. It never holds up a commit: a bus that is away costs followers time, nobody else.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

import msgspec
import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamInfo

from controlplane import subjects
from controlplane.bus import Bus
from controlplane.envelope import Recorded, from_wire, to_wire
from controlplane.log import Log
from controlplane.refusal import Refused
from controlplane.upcast import UnknownEvent

WEEK_S: Final = 7 * 24 * 3600
LEEWAY_MS: Final = 3_600_000
"""The server's clock and ours may differ, and it drops what is a week old when it likes."""
FED: Final = 20_000
"""Events kept for sending; beyond that the table is read again."""
WINDOW: Final = 256
"""Messages sent and not yet acknowledged."""
PAGE: Final = 2_000
ACKNOWLEDGED_S: Final = 5.0
RETRY_S: Final = 0.2
LOOK_S: Final = 5.0
"""While nothing happens, the stream is looked at this often: one that was deleted by hand would else be missed only at the
next event, and followers that start meanwhile find nothing."""
STUCK_S: Final = 5.0
"""A stream that refuses an event for this long (another relay's writing is over in less) is made anew."""
SAMPLES: Final = 16
"""Places at which the stream is compared with the table at each connection; `audit` compares all."""
EXPECTED: Final = "Nats-Expected-Last-Sequence"
log = structlog.get_logger("relay")


class _Restart(Exception):
    """Look at the stream again."""


class _Untaken(_Restart):
    """The stream refused the next event."""


class _Acknowledgement(msgspec.Struct):
    """JetStream's answer to a message: its sequence, or an error."""

    seq: int = 0
    error: dict[str, object] | None = None


_acknowledgements = msgspec.json.Decoder(_Acknowledgement)


class Relay:
    """`feed` after each commit, `run` for ever. `sent` is the last event known to be in the stream."""

    def __init__(self, bus: Bus, log_: Log) -> None:
        self._bus, self._log = bus, log_
        self._fed: deque[Recorded] = deque(maxlen=FED)
        self._news = asyncio.Event()
        self._restart = False
        self._acknowledged: asyncio.Queue[Msg | None] | None = None
        self.sent = 0
        self._stuck = -1, 0.0
        """The last event before the one that the stream refuses, and since when (monotonic seconds)."""
        bus.on_reconnect(self._look_again)

    def feed(self, events: Sequence[Recorded]) -> None:
        """Take committed events. Never waits."""
        self._fed.extend(events)
        self._news.set()

    async def run(self) -> None:
        while True:
            try:
                await self._relay()
            except _Untaken as error:
                log.info("relay_restarts", sent=self.sent, reason=str(error))
                await self._untaken()
            except (_Restart, Refused, nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError) as error:
                log.info("relay_restarts", sent=self.sent, reason=repr(error))
            except Exception:  # e.g. the table can't be read: the desk finds that out by itself, and decides
                log.exception("relay_failed", sent=self.sent)
            await asyncio.sleep(RETRY_S)

    async def _untaken(self) -> None:
        """Replace a stream that takes nothing any more: NATS does not get over a disk that was full, but a new stream does."""
        at, since = self._stuck
        if at != self.sent:
            self._stuck = self.sent, time.monotonic()
        elif time.monotonic() - since > STUCK_S:
            log.warning("stream_replaced", reason=f"it has refused event {self.sent + 1} for {STUCK_S:g} s")
            self._stuck = -1, 0.0
            with contextlib.suppress(nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError):
                await self._bus.js.delete_stream(subjects.STREAM)

    async def caught_up(self, position: int) -> None:
        """Return once event `position` is in the stream. The caller sets the deadline."""
        while self.sent < position:  # noqa: ASYNC110 (rare: at the end of the process)
            await asyncio.sleep(0.005)

    async def _relay(self) -> None:
        await self._bus.connected(timeout_s=ACKNOWLEDGED_S)
        self._restart = False
        self.sent = await self._stream()
        inbox = self._bus.nc.new_inbox()
        acknowledged = self._acknowledged = asyncio.Queue[Msg | None]()

        async def deliver(message: Msg) -> None:
            acknowledged.put_nowait(message)

        subscription = await self._bus.nc.subscribe(inbox, cb=deliver)
        try:
            while True:
                self._news.clear()
                if self._restart:
                    raise _Restart("reconnected")
                if events := await self._next():
                    await self._send(events, inbox, acknowledged)
                elif not await self._heard():
                    await self._still_there()
        finally:
            await subscription.unsubscribe()

    async def _heard(self) -> bool:
        """Wait for news; False: there were none for `LOOK_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._news.wait()
        return self._news.is_set()

    async def _still_there(self) -> None:
        """Raises _Restart, or NotFoundError, when the stream does not end where we left it."""
        last = (await self._bus.js.stream_info(subjects.STREAM)).state.last_seq
        if last != self.sent:
            raise _Restart(f"the stream ends at {last}, event {self.sent} was sent")

    async def _next(self) -> list[Recorded]:
        """The events after `sent`: from what was fed, if that joins on, else from the table."""
        while self._fed and self._fed[0].position <= self.sent:
            self._fed.popleft()
        if self._fed and self._fed[0].position == self.sent + 1:
            return list(islice(self._fed, PAGE))
        return await self._log.read(self.sent, PAGE)

    async def _send(self, events: Sequence[Recorded], inbox: str, acknowledged: asyncio.Queue[Msg | None]) -> None:
        """Send in order, at most WINDOW ahead of the acknowledgements. Raises _Restart at the first refusal."""
        sent = self.sent
        for event in events:
            while sent - self.sent >= WINDOW:
                await self._acknowledge(acknowledged)
            await self._bus.nc.publish(
                subjects.event(event), to_wire(event), reply=inbox, headers={EXPECTED: str(event.position - 1)}
            )
            sent = event.position
        while self.sent < sent:
            await self._acknowledge(acknowledged)

    async def _acknowledge(self, acknowledged: asyncio.Queue[Msg | None]) -> None:
        async with asyncio.timeout(ACKNOWLEDGED_S):
            message = await acknowledged.get()
        if message is None or not message.data:
            raise _Restart("nobody keeps the stream")
        answer = _acknowledgements.decode(message.data)
        if answer.error is not None or answer.seq != self.sent + 1:
            raise _Untaken(f"event {self.sent + 1} was not taken: {answer.error or answer.seq}")
        self.sent = answer.seq

    async def _stream(self) -> int:
        """Return the stream's last sequence; heal or make the stream first if need be."""
        head = await self._log.head()
        try:
            info = await self._bus.js.stream_info(subjects.STREAM)
        except nats.js.errors.NotFoundError:
            return await self._make()
        if (reason := await self._differs(info, head)) is not None:
            log.warning("stream_replaced", reason=reason)
            await self._bus.js.delete_stream(subjects.STREAM)
            return await self._make()
        return info.state.last_seq

    async def _differs(self, info: StreamInfo, head: int) -> str | None:
        """Why the stream can't be a copy of the table's last part; None: it can."""
        state = info.state
        if state.last_seq > head:
            return f"the stream goes to {state.last_seq}, the table to {head}"
        if state.messages and state.messages != state.last_seq - state.first_seq + 1:
            return f"{state.messages} messages between {state.first_seq} and {state.last_seq}"
        kept = await self._log.first_since(_week_ago_ms() + LEEWAY_MS)
        if kept < (state.first_seq if state.messages else state.last_seq + 1):
            return f"event {kept} is younger than a week and gone: the stream begins at {state.first_seq}"
        step = max(1, state.messages // SAMPLES)
        for position in {*range(state.first_seq, state.last_seq, step), state.last_seq} if state.messages else ():
            if not await self._same(position):
                return f"event {position} differs"
        return None

    async def _same(self, position: int) -> bool:
        [stored] = await self._log.read(position - 1, 1)
        try:
            message = await self._bus.js.get_msg(subjects.STREAM, position)
            return from_wire(message.data or b"") == stored
        except (nats.js.errors.NotFoundError, msgspec.DecodeError, UnknownEvent):
            return False

    async def _make(self) -> int:
        """Make the stream, to start at the first event of the kept week."""
        first = await self._log.first_since(_week_ago_ms())
        await self._bus.js.add_stream(
            StreamConfig(
                name=subjects.STREAM, subjects=[subjects.EVENTS], description="A copy of table event, rebuilt from it at will",
                retention=RetentionPolicy.LIMITS, discard=DiscardPolicy.OLD, storage=StorageType.FILE, max_age=WEEK_S,
                num_replicas=1, first_seq=first, duplicate_window=1, allow_direct=True,
            )
        )  # fmt: skip
        log.info("stream_made", first=first)
        return first - 1

    def _look_again(self) -> None:
        self._restart = True
        self._news.set()
        if self._acknowledged is not None:
            self._acknowledged.put_nowait(None)


def _week_ago_ms() -> int:
    return time.time_ns() // 1_000_000 - WEEK_S * 1000
