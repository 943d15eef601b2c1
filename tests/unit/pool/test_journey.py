"""Bytes through helpers: what arrives, what comes back, what a failure leaves."""

import ctypes
import itertools
import threading
import time

import pytest

from pool import fill
from pool.gpu import Activity, Block
from pool.journey import InFlight, Journey, Route
from pool.paths import PIECE_BYTES, RING_BYTES, SMALLEST_BYTES
from pool.routes import Routes
from pool.slabs import Slab, Slabs
from pool.topology import Place, Topology
from tests.fakegpu import MIB, FakeGpu, FakeRelay
from tests.poolroom import wait_for

SIZE = 4 * PIECE_BYTES + 2 * MIB


@pytest.fixture
def pair() -> tuple[FakeGpu, FakeGpu]:
    return FakeGpu(), FakeGpu(uuid="GPU-helper")


@pytest.fixture
def source() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer((bytes(range(251)) * (SIZE // 251 + 1))[:SIZE], SIZE)


def sent(
    target: FakeGpu, helper: FakeGpu, source: ctypes.Array[ctypes.c_char], *, stopped: bool = False
) -> tuple[Journey, Block]:
    route = Route(helper, 0.5)
    if stopped:
        route.stop.set()
    journey = Journey(target, (Route(None, 0.5), route))
    block = target.create(SIZE, journey.writers)
    journey.send(block, 0, Slab(ctypes.addressof(source), SIZE))
    return journey, block


def test_both_links_carry_their_share_and_the_bytes_are_right(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    journey, block = sent(target, helper, source)
    wait_for(lambda: helper.taken == 2)
    own, other = journey.arrive(time.monotonic())
    assert ctypes.string_at(block.address, SIZE) == source.raw
    assert (own.via, own.copied_bytes) == ("GPU-fake", 2 * PIECE_BYTES + 2 * MIB)
    assert (other.via, other.copied_bytes) == ("GPU-helper", 2 * PIECE_BYTES)
    assert target.writers[block.handle] == {"GPU-helper"}
    wait_for(lambda: not helper.rings)  # gone afterwards
    assert helper.most_ring_bytes == RING_BYTES, "bounded"
    target.destroy(block)


def test_a_helper_without_room_leaves_its_share_to_the_direct_link(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    helper.roomless = True
    journey, block = sent(target, helper, source)
    (own,) = journey.arrive(time.monotonic())
    assert own.copied_bytes == SIZE
    assert ctypes.string_at(block.address, SIZE) == source.raw
    target.destroy(block)


def test_a_link_that_is_done_takes_over_what_a_late_helper_has_not_begun(pair, source, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    helper.ring_gate.clear()
    journey, block = sent(target, helper, source)
    wait_for(lambda: helper.taken == 1)
    arrived = target.wait

    def wait() -> None:
        arrived()
        if sum(target.copies) == SIZE - PIECE_BYTES:  # all but what the helper has begun
            helper.ring_gate.set()

    monkeypatch.setattr(target, "wait", wait)
    own, other = journey.arrive(time.monotonic())
    assert (own.copied_bytes, other.copied_bytes) == (SIZE - PIECE_BYTES, PIECE_BYTES)
    assert ctypes.string_at(block.address, SIZE) == source.raw
    target.destroy(block)


def test_a_fill_does_not_wait_for_its_ring_to_be_given_back(pair, source, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    gate = threading.Event()
    closed = FakeRelay.close

    def close(relay: FakeRelay) -> None:
        assert gate.wait(20)
        closed(relay)

    monkeypatch.setattr(FakeRelay, "close", close)
    journey, block = sent(target, helper, source)
    journey.arrive(time.monotonic())
    assert ctypes.string_at(block.address, SIZE) == source.raw
    assert helper.rings == 1
    gate.set()
    wait_for(lambda: not helper.rings)
    target.destroy(block)


def test_a_helper_that_fails_fails_the_fill_and_leaves_nothing_in_flight(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    helper.broken = True
    journey, block = sent(target, helper, source)
    wait_for(lambda: helper.taken)  # else all may have gone by the other link before it has begun
    with pytest.raises(OSError, match="second hop"):
        journey.arrive(time.monotonic())
    journey.abandon()
    target.destroy(block)


def test_a_helper_that_is_needed_for_itself_leaves_the_rest_to_the_direct_link(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    journey, block = sent(target, helper, source, stopped=True)
    (own,) = journey.arrive(time.monotonic())
    assert own.copied_bytes == SIZE
    wait_for(lambda: not helper.rings)
    assert helper.relayed == []
    assert target.copies[0] == PIECE_BYTES, "begun at once"
    assert ctypes.string_at(block.address, SIZE) == source.raw
    target.destroy(block)


def test_what_a_stopped_helper_has_left_goes_while_memory_for_the_rest_is_made(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    route = Route(helper, 0.5)
    journey = Journey(target, (Route(None, 0.5), route))
    target.total_bytes = 1 << 30
    first, second = target.create(SIZE, journey.writers), target.create(SIZE, journey.writers)
    journey.send(first, 0, Slab(ctypes.addressof(source), SIZE))
    route.stop.set()
    journey.send(second, 0, Slab(ctypes.addressof(source), SIZE))
    assert target.queued_bytes >= SIZE, "nothing of the second segment waits for a helper that sends no more"
    shards = journey.arrive(time.monotonic())
    assert sum(shard.copied_bytes for shard in shards) == 2 * SIZE
    assert ctypes.string_at(first.address, SIZE) == ctypes.string_at(second.address, SIZE) == source.raw
    for block in (first, second):
        target.destroy(block)


def test_devices_that_are_filled_beside_do_not_help(pair) -> None:  # type: ignore[no-untyped-def]
    one, other = pair
    places = tuple(Place(device=gpu.uuid, uplink=gpu.uuid) for gpu in pair)
    one.total_bytes = other.total_bytes = 1 << 40
    routes = Routes(pair, Topology(places=places, peers=frozenset({(one.uuid, other.uuid), (other.uuid, one.uuid)})))
    with (
        routes.chosen(one, 1 << 30, beside=(other.uuid,)) as first,
        routes.chosen(other, 1 << 30, beside=(one.uuid,)) as second,
    ):
        assert [[route.helper for route in routes] for routes in (first, second)] == [[None], [None]]


def test_a_fill_asks_those_who_may_help_and_no_more_than_it_needs() -> None:
    asked: list[str] = []

    class Asked(FakeGpu):
        def activity(self) -> Activity | None:
            asked.append(self.uuid)
            return super().activity()

    gpus = [Asked(uuid=f"GPU-{number}", total_bytes=1 << 40) for number in range(8)]
    uuids = [gpu.uuid for gpu in gpus]
    places = tuple(Place(device=uuid, uplink=f"switch-{number // 2}", node=number // 4) for number, uuid in enumerate(uuids))
    routes = Routes(gpus, Topology(places=places, peers=frozenset(itertools.permutations(uuids, 2))))
    with routes.chosen(gpus[0], SMALLEST_BYTES - 1) as chosen:
        assert len(chosen) == 1 and not asked, "a small set goes alone"
    with routes.chosen(gpus[0], 1 << 30, beside=("GPU-5",)) as chosen:
        assert [route.helper and route.helper.uuid for route in chosen] == [None, "GPU-2", "GPU-4", "GPU-6"]
        assert asked == ["GPU-2", "GPU-3", "GPU-4", "GPU-6"], "one behind each switch, and not the target's own"
        asked.clear()
        with routes.chosen(gpus[1], 1 << 30):
            assert asked == ["GPU-3", "GPU-5", "GPU-7"], "nobody who copies already"
    asked.clear()
    gpus[2].computing = gpus[4].computing = {4711}
    with routes.chosen(gpus[0], 1 << 30) as chosen:
        assert [route.helper and route.helper.uuid for route in chosen] == [None, "GPU-3", "GPU-5", "GPU-6"]
        assert asked == ["GPU-2", "GPU-3", "GPU-4", "GPU-5", "GPU-6"]


def test_a_fill_of_a_helper_stops_its_help_and_asks_nobody_who_is_busy(pair) -> None:  # type: ignore[no-untyped-def]
    one, other = pair
    one.total_bytes = other.total_bytes = 1 << 40
    places = tuple(Place(device=gpu.uuid, uplink=gpu.uuid) for gpu in pair)
    peers = frozenset({(one.uuid, other.uuid), (other.uuid, one.uuid)})
    routes = Routes(pair, Topology(places=places, peers=peers))
    with routes.chosen(one, 1 << 30) as first:
        assert [route.helper for route in first] == [None, other]
        with routes.chosen(other, 1 << 30) as second:
            assert [route.helper for route in second] == [None]
            assert first[1].stop.is_set()
        with routes.chosen(other, 1 << 30):
            pass
    with routes.chosen(other, 1 << 30) as third:
        assert [route.helper for route in third] == [None, one]
        assert not third[1].stop.is_set()


def test_a_helper_without_a_thread_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    target, one, other = FakeGpu(), FakeGpu(uuid="GPU-one"), FakeGpu(uuid="GPU-other")
    start = threading.Thread.start

    def full(thread: threading.Thread) -> None:
        if thread.name.endswith(other.uuid):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="new thread"):
        Journey(target, (Route(None, 0.4), Route(one, 0.3), Route(other, 0.3)))
    wait_for(lambda: not one.rings)


def test_an_abandoned_copy_sends_nothing_but_what_is_on_its_way(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    helper.ring_gate.clear()
    route = Route(helper, 0.5)
    journey = Journey(target, (Route(None, 0.5), route))
    block = target.create(SIZE, journey.writers)
    journey.send(block, 0, Slab(ctypes.addressof(source), SIZE))
    wait_for(lambda: helper.taken == 1)
    leaving = threading.Thread(target=journey.abandon)
    leaving.start()
    wait_for(route.stop.is_set)
    assert leaving.is_alive(), "one piece is on its way into memory that would go"
    helper.ring_gate.set()
    leaving.join(20)
    assert (leaving.is_alive(), helper.taken, len(helper.relayed)) == (False, 1, 1)
    target.destroy(block)


def test_a_helper_that_hangs_ends_the_fill_and_keeps_the_memory_that_it_may_still_write(pair, source, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("pool.journey.STALL_S", 0.1)
    target, helper = pair
    helper.ring_gate.clear()
    target.total_bytes = 1 << 30
    slabs = Slabs("ws_a")
    slabs.parts = [Slab(ctypes.addressof(source), SIZE)]
    slabs.parts[0].register(target)
    monkeypatch.setattr(target, "wait", lambda: wait_for(lambda: helper.taken == 1))
    with pytest.raises(InFlight, match=r"GPU-helper has sent nothing for 0\.1 s, 0 bytes before"):
        fill.fill(target, slabs, ((0,),), lambda made: None, (Route(None, 0.5), Route(helper, 0.5)))
    (block,) = target.blocks.values()
    helper.ring_gate.set()
    wait_for(lambda: not helper.rings)
    assert ctypes.string_at(block.address, SIZE) != bytes(SIZE), "what it sent later arrived in memory that nobody else has"
    target.destroy(block)
