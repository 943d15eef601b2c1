"""Turns on a device: who waits goes before what is done in spare time."""

import asyncio
import functools
import threading

import pytest

from pool.lane import Lane, Turn
from pool.residency import Refused
from tests.fakegpu import FakeGpu


async def test_a_wake_goes_before_pinning_that_was_asked_for_earlier() -> None:
    lane, gate, done = Lane(FakeGpu()), threading.Event(), list[str]()
    first = lane.submit(Turn.SPARE, lambda: gate.wait(20))
    pinning = [lane.submit(Turn.SPARE, functools.partial(done.append, f"pin {number}")) for number in range(3)]
    wake = lane.submit(Turn.NOW, lambda: done.append("wake"))
    gate.set()
    await asyncio.gather(first, wake, *pinning)
    assert done == ["wake", "pin 0", "pin 1", "pin 2"]
    await lane.close()


async def test_a_driver_that_hangs_is_said_to_be_silent_and_what_only_looked_is_not_done_later() -> None:
    lane, gate, looked = Lane(FakeGpu()), threading.Event(), list[int]()
    hangs = lane.submit(Turn.NOW, lambda: gate.wait(20))
    with pytest.raises(Refused, match=r"GPU-fake has not answered for 0\.05 s: its driver hangs") as refused:
        await lane.answer(Turn.NOW, lambda: looked.append(1) or 1, 0.05)
    assert refused.value.refusal.code == "device_silent"
    gate.set()
    assert await hangs
    assert await lane.answer(Turn.NOW, lambda: 7, 20) == 7
    assert looked == []
    await lane.close()


async def test_an_end_does_not_wait_for_ever_for_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pool.lane.CLOSE_S", 0.05)
    lane, gate = Lane(FakeGpu()), threading.Event()
    hangs = lane.submit(Turn.NOW, lambda: gate.wait(20))
    await lane.close()
    assert not hangs.done()
    gate.set()
    assert await hangs


async def test_a_time_out_of_the_works_own_stays_what_it_is() -> None:
    lane = Lane(FakeGpu())

    def fails() -> int:
        raise TimeoutError("the work's own")

    with pytest.raises(TimeoutError, match="own"):
        await lane.answer(Turn.NOW, fails, 20)
    await lane.close()


async def test_a_failure_reaches_who_asked_and_the_lane_goes_on() -> None:
    lane = Lane(FakeGpu())

    def fails() -> None:
        raise OSError(719, "the device is gone")

    with pytest.raises(OSError, match="the device is gone"):
        await lane.submit(Turn.NOW, fails)
    assert await lane.submit(Turn.NOW, lambda: 7) == 7
    await lane.close()


async def test_all_work_is_done_by_the_one_thread_that_is_bound_to_the_device() -> None:
    gpu = FakeGpu()
    lane = Lane(gpu)
    threads = {await lane.submit(Turn.NOW, threading.get_ident) for _ in range(3)}
    assert threads == gpu.threads
    await lane.close()
