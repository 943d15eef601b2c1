"""The latest-frame hub: one encoding for all, nothing queued for the slow, an end at once."""

import asyncio
import time

import pytest

from web.live.frame import partial
from web.live.hub import HEARTBEAT, STUCK_S, Hub, Reader


async def _next(hub: Hub, reader: Reader) -> bytes | None:
    async with asyncio.timeout(20):
        return await hub.next(reader)


async def test_readers_that_keep_up_get_the_very_same_bytes() -> None:
    hub = Hub()
    first, second = hub.join(hub.mark), hub.join(hub.mark)
    hub.publish({"a": b"<a>"})
    frames = [await _next(hub, first), await _next(hub, second)]
    assert frames[0] is frames[1]
    assert frames[0] == b"id: %b.1\ndata: <a>\n\n" % hub.id.encode()


async def test_a_slow_reader_skips_to_the_newest_of_everything_it_missed() -> None:
    hub = Hub()
    slow = hub.join(hub.mark)
    hub.publish({"a": b"a1", "b": b"b1"})
    hub.publish({"c": b"c1"})
    hub.publish({"a": b"a2"})
    assert await _next(hub, slow) == b"id: %b.3\ndata: b1c1a2\n\n" % hub.id.encode()
    hub.publish({"b": b"b2"})
    assert await _next(hub, slow) == b"id: %b.4\ndata: b2\n\n" % hub.id.encode()


async def test_a_page_gets_only_what_is_newer_than_what_it_was_drawn_from() -> None:
    hub = Hub()
    hub.publish({"a": b"a1"})
    mark = hub.mark
    hub.publish({"b": b"b1"})
    assert b"data: b1\n" in (await _next(hub, hub.join(mark)) or b"")


async def test_a_mark_of_another_life_or_a_wrong_one_gets_all() -> None:
    hub = Hub()
    hub.publish({"a": b"a1"})
    hub.publish({"b": b"b1"})
    for mark in ("", "x", "deadbeef.1", f"{hub.id}.99", f"{hub.id}.-1", f"{hub.id}.²", f"{hub.id}.{'9' * 40}"):
        assert b"data: a1b1\n" in (await _next(hub, hub.join(mark)) or b""), mark


async def test_memory_is_one_piece_per_fragment_and_those_gone_are_forgotten() -> None:
    hub = Hub()
    for n in range(1000):
        hub.publish({"a": b"a%d" % n, f"m{n}": b"m"}, gone=[f"m{n - 1}"])
    assert hub.frame(-1).count(b"a") - hub.frame(-1).count(b"data") * 2 <= 8
    assert len(hub._pieces) == 2
    assert len(hub._joins) == 1


async def test_a_heartbeat_goes_to_those_that_have_nothing_else() -> None:
    hub = Hub()
    reader = hub.join(hub.mark)
    waiting = asyncio.ensure_future(_next(hub, reader))
    await asyncio.sleep(0)
    hub.beat()
    assert await waiting == HEARTBEAT


async def test_closing_ends_waiting_readers_at_once() -> None:
    hub = Hub()
    readers = [asyncio.ensure_future(_next(hub, hub.join(hub.mark))) for _ in range(50)]
    await asyncio.sleep(0)
    hub.close()
    assert await asyncio.gather(*readers) == [None] * 50
    assert await _next(hub, hub.join("")) is None


async def test_a_reader_whose_socket_takes_nothing_is_let_go() -> None:
    hub = Hub()

    async def stuck() -> None:
        reader = hub.join(hub.mark)
        reader.sending_since = -2 * STUCK_S
        await asyncio.Event().wait()

    task = asyncio.ensure_future(stuck())
    await asyncio.sleep(0)
    hub.beat()
    await asyncio.wait([task], timeout=20)
    assert task.cancelled()


async def test_nobody_is_stuck_while_we_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    hub, now = Hub(), time.monotonic()
    left: list[Reader] = []

    async def sending() -> None:
        reader = hub.join(hub.mark)
        reader.sending_since = now
        left.append(reader)
        await asyncio.Event().wait()

    task = asyncio.ensure_future(sending())
    await asyncio.sleep(0)
    for later, cut in ((600, False), (615, False), (635, True)):
        monkeypatch.setattr("web.live.hub.monotonic", lambda later=later: now + later)
        hub.beat()
        assert bool(task.cancelling()) is cut
    await asyncio.wait([task], timeout=20)


def test_a_fragment_may_hold_any_line_break() -> None:
    piece = partial("x", "\n<p>a\r\nb\rc</p>\n")
    assert piece == b'<hx-partial id="x" hx-swap="outerMorph"><p>a&#13;\ndata: b&#13;c</p></hx-partial>'
