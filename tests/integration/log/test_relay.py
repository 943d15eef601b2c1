"""Relay and follower over a real NATS: a copy that heals, and readers that neither skip nor count twice."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from controlplane import subjects
from controlplane.bus import Bus
from controlplane.envelope import Recorded, from_wire
from controlplane.events import GatewayOpened, NodeFellSilent
from controlplane.follower import Behind, follow
from controlplane.log.postgres import PostgresLog
from controlplane.relay import Relay
from tests.chronicle import Chronicle


class Scribe:
    """Appends events and feeds the relay, as the desk would."""

    def __init__(self, log: PostgresLog, epoch: int) -> None:
        self.log, self.epoch, self.chronicle, self.written = log, epoch, Chronicle(at_ms=_now_ms()), list[Recorded]()

    async def write(self, count: int, relay: Relay | None = None, node: str | None = None) -> None:
        events = [NodeFellSilent(node=node)] * count if node else [
            GatewayOpened(gateway=f"gw_{len(self.written) + n}", host="h", pid=n) for n in range(count)
        ]  # fmt: skip
        made = self.chronicle.record(*events)
        await self.log.append(self.epoch, made)
        self.written += made
        if relay is not None:
            relay.feed(made)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture
async def scribe(log: PostgresLog) -> Scribe:
    return Scribe(log, await log.begin_reign("h", 1))


@pytest.fixture
async def relay(bus: Bus, log: PostgresLog) -> AsyncIterator[Relay]:
    made = Relay(bus, log)
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()


async def in_stream(bus: Bus) -> list[Recorded]:
    state = (await bus.js.stream_info(subjects.STREAM)).state
    messages = [await bus.js.get_msg(subjects.STREAM, at) for at in range(state.first_seq, state.last_seq + 1)]
    return [from_wire(message.data or b"") for message in messages]


async def take(bus: Bus, count: int, after: int = 0, filters: list[str] | None = None) -> list[Recorded]:
    taken = list[Recorded]()
    async with asyncio.timeout(60):
        async for event in follow(bus, after=after, filters=filters):
            taken.append(event)
            if len(taken) == count:
                break
    return taken


async def reached(relay: Relay, position: int) -> None:
    async with asyncio.timeout(60):
        await relay.caught_up(position)


async def test_what_is_fed_and_what_is_only_in_the_table_reach_the_stream_in_order(
    bus: Bus, scribe: Scribe, relay: Relay
) -> None:
    await scribe.write(3)
    await scribe.write(600, relay)
    await reached(relay, 603)
    await scribe.write(2, relay)
    assert await take(bus, 605) == scribe.written
    await reached(relay, 605)
    assert await in_stream(bus) == scribe.written


async def test_a_follower_hears_an_event_at_once(bus: Bus, scribe: Scribe, relay: Relay) -> None:
    await scribe.write(1, relay)
    following = asyncio.create_task(take(bus, 3))
    await reached(relay, 1)
    await scribe.write(2, relay)
    assert await following == scribe.written


async def test_a_lost_stream_is_made_anew(bus: Bus, scribe: Scribe, relay: Relay) -> None:
    await scribe.write(10, relay)
    await reached(relay, 10)
    await bus.js.delete_stream(subjects.STREAM)
    await scribe.write(1, relay)
    assert await take(bus, 11) == scribe.written


async def test_a_stream_that_is_lost_while_nothing_happens_is_made_anew(
    bus: Bus, scribe: Scribe, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.relay.LOOK_S", 0.05)
    await scribe.write(3, relay)
    await reached(relay, 3)
    await bus.js.delete_stream(subjects.STREAM)
    assert await take(bus, 3) == scribe.written


async def test_a_stream_cut_at_its_end_is_filled_up(bus: Bus, scribe: Scribe, log: PostgresLog) -> None:
    await scribe.write(20)
    old = Relay(bus, log)
    running = asyncio.create_task(old.run())
    await reached(old, 20)
    running.cancel()
    for position in (19, 20):
        await bus.js.delete_msg(subjects.STREAM, position)
    await scribe.write(3)
    fresh = Relay(bus, log)
    running = asyncio.create_task(fresh.run())
    await reached(fresh, 23)
    assert await in_stream(bus) == scribe.written
    running.cancel()


async def test_a_stream_with_a_foreign_message_is_replaced(bus: Bus, scribe: Scribe, log: PostgresLog) -> None:
    await scribe.write(2)
    first = Relay(bus, log)
    running = asyncio.create_task(first.run())
    await reached(first, 2)
    running.cancel()
    await bus.js.publish("events._.gateway.GatewayOpened", b"{}")
    await scribe.write(3)
    second = Relay(bus, log)
    running = asyncio.create_task(second.run())
    await reached(second, 5)
    assert await in_stream(bus) == scribe.written
    running.cancel()


async def test_a_stream_longer_than_the_table_is_replaced(bus: Bus, scribe: Scribe, relay: Relay, log: PostgresLog) -> None:
    await scribe.write(4, relay)
    await reached(relay, 4)
    await bus.js.publish("events._.gateway.GatewayOpened", b"{}")
    await scribe.write(1, relay)
    await reached(relay, 5)
    assert await in_stream(bus) == scribe.written


async def test_a_stream_starts_with_the_week_and_older_followers_are_told(bus: Bus, scribe: Scribe, log: PostgresLog) -> None:
    scribe.chronicle.at_ms -= 8 * 24 * 3600 * 1000
    await scribe.write(5)
    scribe.chronicle.at_ms = _now_ms()
    await scribe.write(5)
    made = Relay(bus, log)
    running = asyncio.create_task(made.run())
    await reached(made, 10)
    assert (await bus.js.stream_info(subjects.STREAM)).state.first_seq == 6
    with pytest.raises(Behind, match="starts at 6"):
        await take(bus, 1, after=2)
    assert await take(bus, 5, after=5) == scribe.written[5:]
    running.cancel()


async def test_a_filtered_follower_gets_its_own_and_nothing_else(bus: Bus, scribe: Scribe, relay: Relay) -> None:
    await scribe.write(5, relay)
    await scribe.write(2, relay, node="n1")
    await scribe.write(2, relay, node="n2")
    await scribe.write(1, relay, node="n1")
    events = await take(bus, 3, filters=subjects.events_for_node("n1"))
    assert [event.position for event in events] == [6, 7, 10]


async def test_a_follower_drops_what_it_has_seen_when_the_stream_is_made_anew(bus: Bus, scribe: Scribe, relay: Relay) -> None:
    await scribe.write(8, relay)
    await reached(relay, 8)
    seen = list[int]()

    async def watch() -> None:
        async for event in follow(bus, after=0):
            seen.append(event.position)
            if event.position == 12:
                return

    watching = asyncio.create_task(watch())
    await scribe.write(2, relay)
    async with asyncio.timeout(60):
        while len(seen) < 10:
            await asyncio.sleep(0.01)
    await bus.js.delete_stream(subjects.STREAM)
    await scribe.write(2, relay)
    async with asyncio.timeout(60):
        await watching
    assert seen == list(range(1, 13))
