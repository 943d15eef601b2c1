"""Wakes beside what others do: a set that is being brought, an engine that decodes on the same device. The GPU is played."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pool import arena, daemon, deposits, devicelink, devices, stage
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


async def test_a_copy_is_slowed_only_where_another_engine_decodes(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def pace(gpu: Gpu, share: float) -> Pace:
        asked.append(gpu.uuid)
        return FREE

    monkeypatch.setattr(devices, "pace_beside", pace)
    first = await room.deposit()
    room.weights = room.weights[::-1]
    second = await asyncio.to_thread(devicelink.deposit, room.socket, room.request(form="cfg_2"), room.write)
    one = await room.attach(first)
    assert asked == [], "alone on its device nobody is asked, for that takes milliseconds"
    other = await room.attach(second.weight_set)
    assert asked == [room.gpu.uuid]
    await asyncio.to_thread(one.release)
    await asyncio.to_thread(other.release)
    again = await room.attach(first)
    assert asked == [room.gpu.uuid], "its neighbour has gone"
    await asyncio.to_thread(again.release)


def test_a_thread_that_computes_does_not_keep_the_interpreter_from_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    monkeypatch.setattr("sys.setswitchinterval", told.append)
    monkeypatch.setattr("os.umask", lambda mask: 0)
    (tmp_path / "open").mkdir(mode=0o755)
    arguments = ["--socket", str(tmp_path / "s"), "--directory", str(tmp_path / "open"), "--budget", "1"]
    assert daemon.main(arguments) == 2, "that directory is everybody's"
    assert told == [pytest.approx(daemon.SWITCH_S)]
    assert daemon.SWITCH_S <= 0.001
