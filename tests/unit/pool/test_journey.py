"""Bytes through helpers: what arrives, what comes back, what a failure leaves."""

import ctypes
import time

import pytest

from pool.gpu import Block
from pool.journey import Journey, Route
from pool.paths import PIECE_BYTES, RING_BYTES
from pool.routes import Routes
from pool.slabs import Slab
from pool.topology import Place, Topology
from tests.fakegpu import MIB, FakeGpu

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
    journey.send(block, Slab(ctypes.addressof(source), SIZE))
    return journey, block


def test_both_links_carry_their_share_and_the_bytes_are_right(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    journey, block = sent(target, helper, source)
    own, other = journey.arrive(time.monotonic())
    assert ctypes.string_at(block.address, SIZE) == source.raw
    assert (own.via, own.copied_bytes) == ("GPU-fake", 2 * PIECE_BYTES + 2 * MIB)
    assert (other.via, other.copied_bytes) == ("GPU-helper", 2 * PIECE_BYTES)
    assert target.writers[block.handle] == {"GPU-helper"}
    assert (helper.rings, helper.most_ring_bytes) == (0, RING_BYTES), "bounded, and gone afterwards"
    target.destroy(block)


def test_a_helper_without_room_leaves_its_share_to_the_direct_link(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    helper.roomless = True
    journey, block = sent(target, helper, source)
    (own,) = journey.arrive(time.monotonic())
    assert own.copied_bytes == SIZE
    assert ctypes.string_at(block.address, SIZE) == source.raw
    target.destroy(block)


def test_a_helper_that_fails_fails_the_fill_and_leaves_nothing_in_flight(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    helper.broken = True
    journey, block = sent(target, helper, source)
    with pytest.raises(OSError, match="second hop"):
        journey.arrive(time.monotonic())
    journey.abandon()
    target.destroy(block)


def test_a_helper_that_is_needed_for_itself_leaves_the_rest_to_the_direct_link(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    journey, block = sent(target, helper, source, stopped=True)
    (own,) = journey.arrive(time.monotonic())
    assert own.copied_bytes == SIZE
    assert (helper.relayed, helper.rings) == ([], 0)
    assert target.copies[0] == PIECE_BYTES, "begun at once"
    assert ctypes.string_at(block.address, SIZE) == source.raw
    target.destroy(block)


def test_what_a_stopped_helper_has_left_goes_while_memory_for_the_rest_is_made(pair, source) -> None:  # type: ignore[no-untyped-def]
    target, helper = pair
    route = Route(helper, 0.5)
    journey = Journey(target, (Route(None, 0.5), route))
    target.total_bytes = 1 << 30
    first, second = target.create(SIZE, journey.writers), target.create(SIZE, journey.writers)
    journey.send(first, Slab(ctypes.addressof(source), SIZE))
    route.stop.set()
    journey.send(second, Slab(ctypes.addressof(source), SIZE))
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
