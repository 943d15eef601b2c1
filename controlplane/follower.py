"""Following the log on JetStream: an ordered push consumer of our own, resumed from the last position after any trouble.

Sequence n of the stream is event n, so the place to resume is simply the last position seen. Every delivery also
carries the consumer's own count, which must rise by one: a missing message is noticed at once, filtered or not, and
the consumer is made anew from the last position. A position that was seen already is dropped.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Final

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from controlplane import subjects
from controlplane.bus import Bus
from controlplane.envelope import Recorded, from_wire
from controlplane.refusal import Refused

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 2.5
"""Two heartbeats and a half: the consumer is gone."""
RETRY_S: Final = 0.1
INACTIVE_S: Final = 10.0
"""The server forgets a consumer that nobody listens to after this long."""

log = structlog.get_logger("follower")


class Behind(Exception):
    """The stream no longer holds the next event: start from a newer state (`Bus.state`) and follow from its position.

    Attributes: after: the last position seen; first: the first position that the stream still holds.
    """

    def __init__(self, after: int, first: int) -> None:
        super().__init__(f"event {after + 1} has left the stream, which starts at {first}; start from a newer state")
        self.after, self.first = after, first


class _Lost(Exception):
    """The consumer has to be made anew."""


async def follow(bus: Bus, *, after: int, filters: list[str] | None = None) -> AsyncGenerator[Recorded, None]:
    """Yield events with a position above `after`, in order, each once, for ever.

    Without `filters` (subjects) positions are contiguous. Survives restarts of NATS, of the decider and of the stream;
    ends when the bus is closed. Raises Behind when the stream starts later than `after + 1`.
    """
    last = after
    while not bus.closed.is_set():
        feed = _feed(bus, last, filters)
        try:
            async for recorded in feed:
                if recorded.position <= last:
                    continue
                if filters is None and recorded.position != last + 1:
                    raise _Lost(f"event {recorded.position} came after {last}")
                last = recorded.position
                yield recorded
        except (_Lost, Refused, nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError) as error:
            log.info("follower_resumes", bus=bus.name, after=last, reason=repr(error))
            await asyncio.sleep(RETRY_S)
        finally:
            await feed.aclose()


async def _feed(bus: Bus, after: int, filters: list[str] | None) -> AsyncGenerator[Recorded, None]:
    """Yield what one consumer delivers. Raises _Lost when it is gone or has skipped something."""
    queue: asyncio.Queue[Msg | None] = asyncio.Queue()

    async def deliver(message: Msg) -> None:
        queue.put_nowait(message)

    await bus.connected(timeout_s=SILENCE_S)
    inbox = bus.nc.new_inbox()
    subscription = await bus.nc.subscribe(inbox, cb=deliver, pending_msgs_limit=0, pending_bytes_limit=0)
    forget = bus.on_reconnect(lambda: queue.put_nowait(None))
    try:
        await _consumer(bus, inbox, after, filters)
        expected = 1
        while True:
            message = await _next(queue)
            if message is None:
                raise _Lost("reconnected")
            if not message.data and message.headers:  # a heartbeat, or a request for flow control
                if message.reply:
                    await message.respond(b"")
                continue
            sequence, count = _places(message.reply)
            if count != expected:
                raise _Lost(f"delivery {count} came instead of {expected}")
            expected += 1
            recorded = from_wire(message.data)
            if recorded.position != sequence:
                raise _Lost(f"message {sequence} of the stream holds event {recorded.position}")
            yield recorded
    finally:
        forget()
        await _unsubscribe(subscription)


async def _consumer(bus: Bus, inbox: str, after: int, filters: list[str] | None) -> None:
    stream = await bus.js.stream_info(subjects.STREAM)
    if stream.state.first_seq > after + 1:
        raise Behind(after, stream.state.first_seq)
    await bus.js.add_consumer(
        subjects.STREAM,
        ConsumerConfig(
            deliver_subject=inbox, deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after + 1,
            ack_policy=AckPolicy.NONE, max_deliver=1, filter_subjects=filters, flow_control=True, idle_heartbeat=HEARTBEAT_S,
            inactive_threshold=INACTIVE_S, mem_storage=True, num_replicas=1,
        ),
    )  # fmt: skip


async def _next(queue: asyncio.Queue[Msg | None]) -> Msg | None:
    if not queue.empty():
        return queue.get_nowait()
    try:
        async with asyncio.timeout(SILENCE_S):
            return await queue.get()
    except TimeoutError as error:
        raise _Lost(f"silent for {SILENCE_S} s") from error


async def _unsubscribe(subscription: Subscription) -> None:
    with contextlib.suppress(nats.errors.Error, OSError):
        await subscription.unsubscribe()


def _places(reply: str) -> tuple[int, int]:
    """(stream sequence, consumer's count) out of `$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<count>.…`."""
    tokens = reply.split(".")
    return (int(tokens[5]), int(tokens[6])) if len(tokens) == 9 else (int(tokens[7]), int(tokens[8]))
