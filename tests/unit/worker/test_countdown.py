"""Deadlines that a standstill of this process begins anew."""

import asyncio
import socket
import time

import pytest

from worker import countdown
from worker.countdown import Countdown, within


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(countdown, "STEP_S", 0.02)
    monkeypatch.setattr(countdown, "STOOD_S", 0.2)


async def test_it_calls_once_when_the_time_is_over() -> None:
    called: list[float] = []
    began = time.monotonic()
    Countdown(0.1, lambda: called.append(time.monotonic()))
    async with asyncio.timeout(30):
        while not called:
            await asyncio.sleep(0.01)
    assert called[0] - began >= 0.1
    await asyncio.sleep(0.1)
    assert len(called) == 1


async def test_one_that_is_cancelled_never_calls() -> None:
    called: list[bool] = []
    counting = Countdown(0.02, lambda: called.append(True))
    await asyncio.sleep(0)
    counting.cancel()
    await asyncio.sleep(0.1)
    assert called == []


async def test_what_came_during_a_standstill_is_read_before_the_deadline_is_over() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    answered = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(ours, lambda: answered.done() or answered.set_result(True))
    try:
        async with within(0.3):
            await asyncio.sleep(0.05)
            theirs.send(b"x")
            time.sleep(1.0)  # the loop stands still
            await asyncio.wait([answered])
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        ours.close()
        theirs.close()


async def test_nobody_who_never_answers_is_waited_for_without_end() -> None:
    async def ask() -> None:
        async with within(0.1):
            time.sleep(0.5)
            await asyncio.Event().wait()

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await ask()
    assert time.monotonic() - began < 15


async def test_a_machine_that_stands_still_again_and_again_extends_no_deadline_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(countdown, "STOOD_S", 0.05)
    stood = list[float]()

    async def thrash() -> None:
        while len(stood) < 100:
            stood.append(time.monotonic())
            time.sleep(0.1)
            await asyncio.sleep(0.001)

    thrashing = asyncio.create_task(thrash())
    with pytest.raises(TimeoutError):
        async with within(0.3):
            await thrashing
    assert countdown.ANEW < len(stood) < 100
