"""Wakes beside what others do: a set that is being brought, an engine that decodes on the same device. The GPU is played."""

import asyncio
import os
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Set
from pathlib import Path

import pytest

from pool import arena, daemon, deposits, devicelink, devices, server, stage
from pool.client import PoolClient
from pool.gpu import Gpu
from pool.pace import FREE, Pace
from tests.fakegpu import FakeGpu
from tests.integration.pool.test_devices import Room, opened
from tests.poolroom import until


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with opened(tmp_path, FakeGpu()) as found:
        yield found


@pytest.mark.parametrize(
    ("where", "what"), [(arena, "allocate"), (stage, "read_into"), (deposits, "digest_of")], ids=["memory", "files", "digests"]
)
async def test_a_wake_waits_for_no_staging_whatever_that_is_at(
    room: Room, monkeypatch: pytest.MonkeyPatch, where: object, what: str
) -> None:
    weight_set = await room.deposit()
    await until(lambda: len(room.gpu.registered) == 2)
    gate, there = threading.Event(), threading.Event()
    work = getattr(where, what)

    def held(*args: object, **more: object) -> object:
        there.set()
        assert gate.wait(20)
        return work(*args, **more)

    monkeypatch.setattr(where, what, held)
    room.weights = room.weights[::-1]

    async def bring() -> None:
        if what == "read_into":
            async with await PoolClient.connect(room.socket) as client:
                await client.stage(room.source)
        else:
            await room.deposit()

    bringing = asyncio.create_task(bring())
    await until(there.is_set)
    registered = dict(room.gpu.registered)
    for _ in range(3):
        attachment = await room.attach(weight_set)
        await asyncio.to_thread(attachment.release)
    assert not bringing.done()
    assert room.gpu.registered == registered, "and nothing is pinned between its copies"
    gate.set()
    await bringing


async def test_a_copy_asks_for_the_engines_whose_weights_lie_beside_it(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Set[int]] = []

    def pace(gpu: Gpu, share: float, bytes_per_s: float, neighbours: Set[int]) -> Pace:
        asked.append(neighbours)
        return FREE

    monkeypatch.setattr(devices, "pace_beside", pace)
    first = await room.deposit()
    room.weights = room.weights[::-1]
    second = (await asyncio.to_thread(devicelink.deposit, room.socket, room.request(form="cfg_2"), room.write)).weight_set

    async def attach(engine: int, weight_set: str) -> devicelink.DeviceAttachment:
        monkeypatch.setattr(server, "peer", lambda sock: engine)
        attachment: devicelink.DeviceAttachment = await room.attach(weight_set)
        return attachment

    one = await attach(11, first)
    assert asked == [], "alone on its device nobody is asked, for that takes milliseconds"
    other = await attach(12, second)
    assert asked.pop() == {11}
    await asyncio.to_thread(one.close)  # without a word
    await until(lambda: len(room.gpu.blocks) == 2)
    third = await attach(13, first)
    assert asked.pop() == {12}
    await asyncio.to_thread(other.release)
    fourth = await attach(14, second)
    assert asked.pop() == {13}, "what has gone to sleep is no neighbour"
    await asyncio.to_thread(third.release)
    await asyncio.to_thread(fourth.release)
    fifth = await attach(15, first)
    assert asked == []
    other = await attach(12, second)
    assert asked.pop() == {15}
    room.weights = room.weights[1:] + room.weights[:1]
    third_set = await asyncio.to_thread(devicelink.deposit, room.socket, room.request(form="cfg_3"), room.write)
    fifth = await asyncio.to_thread(devicelink.exchange, fifth, third_set.weight_set)
    assert asked.pop() == {12}, "whose own weights are replaced was at work just now, and rests meanwhile"
    third = await attach(13, first)
    assert asked.pop() == {12, 15}
    for attachment in (fifth, other, third):
        await asyncio.to_thread(attachment.release)


async def test_who_connects_is_known_by_its_process(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    real = server.peer
    monkeypatch.setattr(server, "peer", lambda sock: told.append(real(sock)) or told[-1])
    await room.described()
    assert told == [os.getpid()]


def delay_s() -> float:
    """What a thread that comes back from the driver waits for the interpreter while another computes, the median of 30."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            pass

    other = threading.Thread(target=compute)
    other.start()
    try:
        found = []
        for _ in range(30):
            begun = time.perf_counter()
            time.sleep(0)
            found.append(time.perf_counter() - begun)
        return statistics.median(found)
    finally:
        over.set()
        other.join()


def test_a_thread_that_computes_does_not_keep_the_interpreter_from_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.umask", lambda mask: 0)
    (tmp_path / "open").mkdir(mode=0o755)
    arguments = ["--socket", str(tmp_path / "s"), "--directory", str(tmp_path / "open"), "--budget", "1"]
    usual = sys.getswitchinterval()
    deadline = time.monotonic() + 30
    try:
        while True:  # by turns: the machine may be busy with something else
            sys.setswitchinterval(usual)
            before = delay_s()
            assert daemon.main(arguments) == 2, "that directory is everybody's"
            if delay_s() < before / 2:
                break
            assert time.monotonic() < deadline, f"it takes {before * 1000:.1f} ms, and no less in a daemon"
    finally:
        sys.setswitchinterval(usual)
