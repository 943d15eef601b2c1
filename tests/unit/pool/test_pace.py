"""Copies beside a neighbour that decodes: how fast, and when they are slowed at all."""

import asyncio
import ctypes

import pytest

from pool.daemon import _options
from pool.device import Device, Resident
from pool.journey import Journey
from pool.lane import Lane
from pool.pace import FREE, Pace, pace_beside
from pool.slabs import Slab
from tests.fakegpu import MIB, FakeGpu

GB = 1e9


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def wait(self, seconds: float) -> None:
        self.now += seconds


def paced(rate: float) -> tuple[Pace, Clock]:
    clock = Clock()
    return Pace(rate, clock=lambda: clock.now, wait=clock.wait), clock


def test_a_copy_keeps_to_its_rate_from_the_first_byte_to_the_last() -> None:
    pace, clock = paced(40 * GB)
    for _ in range(500):
        pace.hold(32 * MIB)
    assert clock.now - 100 == pytest.approx(499 * 32 * MIB / (40 * GB)), "the first piece leaves at once"


def test_what_was_lost_meanwhile_is_caught_up() -> None:
    pace, clock = paced(1 * GB)
    pace.hold(1000)
    clock.now += 1.0  # memory was made
    before = clock.now
    for _ in range(10):
        pace.hold(1000)
    assert clock.now == before


def test_a_copy_without_a_limit_waits_for_nobody() -> None:
    FREE.hold(1 << 60)
    FREE.hold(1 << 60)


@pytest.mark.parametrize(
    ("computing", "neighbours", "slowed"),
    [
        pytest.param({7}, {7, 8}, True, id="a neighbour decodes"),
        pytest.param({9}, {7, 8}, False, id="who computed has gone to sleep, its neighbours rest"),
        pytest.param(set(), {7}, False, id="nobody"),
        pytest.param(None, {7}, True, id="the driver does not tell"),
        pytest.param({9}, {7, 0}, True, id="it may be the one that can't be known"),
        pytest.param(set(), {0}, False, id="one that can't be known, and nobody computes"),
    ],
)
def test_it_is_slowed_beside_a_neighbours_kernels_only_and_as_its_link_is(
    computing: set[int] | None, neighbours: set[int], slowed: bool
) -> None:
    gpu = FakeGpu(computing=computing)
    assert pace_beside(gpu, 0.9, 20 * GB, neighbours).bytes_per_s == (18 * GB if slowed else None)
    assert pace_beside(gpu, 1.0, 20 * GB, neighbours) is FREE


def test_pieces_of_a_journey_are_paced_and_all_arrive() -> None:
    size = 96 * MIB
    source = ctypes.create_string_buffer(b"\7" * size, size)
    pace, clock = paced(32 * MIB)
    gpu = FakeGpu()
    journey = Journey(gpu, (), pace)
    block = gpu.create(size)
    journey.send(block, 0, Slab(ctypes.addressof(source), size))
    journey.arrive(0.0)
    assert clock.now - 100 == pytest.approx(2.0), "three pieces of 32 MiB, the first at once"
    assert ctypes.string_at(block.address, size) == source.raw
    gpu.destroy(block)


@pytest.mark.parametrize("share", ["0", "-1", "nan", "0.09"])
def test_a_share_at_which_nothing_would_move_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _options(["--socket", "s", "--directory", "d", "--budget", "1", "--beside-decoding", share])
    assert "less than 0.1" in capsys.readouterr().err


async def test_neighbours_are_all_who_have_weights_there_and_nobody_else() -> None:
    lane, loop = Lane(FakeGpu()), asyncio.get_running_loop()
    device = Device(lane, 1 << 30)
    resident = Resident("ws_a", loop.create_future(), loop.create_future(), (), holders=1)
    device.residents["ws_a"] = resident
    assert device.serves(), "also for one that gets a part of the same set for itself"
    resident.holders = 0
    assert not device.serves()
    device.left["ws_c", 1 << 20] += 1
    assert device.serves(), "an engine that maps what a dead daemon brought decodes, too"
    device.left["ws_c", 1 << 20] -= 1
    del device.residents["ws_a"]
    device.former.add(resident)
    resident.holders = 1
    assert device.serves(), "a copy that was found corrupt is somebody's memory"
    resident.filled.set_exception(OSError())
    assert not device.serves(), "there is no engine where the copy failed"
    await lane.close()
