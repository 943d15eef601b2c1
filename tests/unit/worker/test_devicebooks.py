"""What the worker sees on its GPUs, with the driver played: whose it is, and what it tells the plane of others."""

import asyncio
import os
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane.commands import ReportForeign
from controlplane.events.node import Outsider
from controlplane.plane import Plane, PlaneDevice
from pool.described import Described
from worker import devicebooks, gpus, processes
from worker.devicebooks import DeviceBooks
from worker.engines.messages import State
from worker.instancedir import Record
from worker.report import Report

GPU = "GPU-1"
NOBODY = (1 << 22) + 1
"""No process of this machine has it, so none has a name."""
POOL = Described(pid=7, sets=(), used_bytes=0, budget_bytes=0)
ASLEEP = State(attached=None, awake=False, running=0, bytes_mapped=0, bytes_kv=0, bytes_private=0)


class Machine:
    """One GPU of 1,000 bytes, and a worker that looks at it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.processes: dict[int, int] = {7: 50}
        self.engines: list[tuple[Record, State | None]] = []
        self.reports: list[Report] = []
        monkeypatch.setattr(gpus, "processes", lambda _: dict(self.processes))
        monkeypatch.setattr(gpus, "used_bytes", lambda _: sum(self.processes.values()) + 10)
        plane = Plane(
            data=str(tmp_path), postgres_url="", nats_url="",
            devices=(
                PlaneDevice(device=GPU, name="gpu0", kind="gpu", size_bytes=1000),
                PlaneDevice(device="d", name="cpu0", kind="cpu", size_bytes=9),
            ),
        )  # fmt: skip
        self.books = DeviceBooks(plane, lambda: tuple(self.engines), self.reports.append)

    def engine(self, pid: int) -> None:
        record = Record(instance="ins_1", configuration="cfg_1", device=GPU, engine=processes.Process(pid, 1, "boot"))
        self.engines, self.processes[pid] = [(record, ASLEEP)], 100

    async def looks(self, count: int = 2, pool: Described | None = POOL) -> list[tuple[Outsider, ...]]:
        """What so many looks in a row led to."""
        before = len(self.reports)
        for _ in range(count):
            await self.books.measure(pool)
        assert all(isinstance(one, ReportForeign) and one.device == GPU for one in self.reports[before:])
        return [one.processes for one in self.reports[before:] if isinstance(one, ReportForeign)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


async def test_others_are_told_of_by_pid_and_name_and_again_when_they_have_gone(machine: Machine) -> None:
    machine.engine(NOBODY)
    assert await machine.looks() == [()]
    machine.processes[os.getpid()] = 300
    (found,) = await machine.looks(4)
    (one,) = found
    assert (one.pid, one.size_bytes) == (os.getpid(), 300)
    assert one.name == Path("/proc/self/comm").read_text().strip()
    owners = (await machine.books.measure(POOL))[GPU]
    assert (owners.foreign, owners.skeletons, owners.pool_context, owners.driver) == ({os.getpid(): 300}, 100, 50, 10)
    del machine.processes[os.getpid()]
    assert await machine.looks(4) == [()]


async def test_an_engine_that_has_ended_is_nobody_elses_while_the_driver_still_lists_it(machine: Machine) -> None:
    machine.engine(NOBODY)
    await machine.looks()
    machine.engines = []
    assert await machine.looks(5) == []
    owners = (await machine.books.measure(POOL))[GPU]
    assert (owners.foreign, owners.driver, owners.total) == ({}, 110, 160)
    del machine.processes[NOBODY]
    await machine.looks()
    machine.processes[NOBODY] = 30
    assert await machine.looks() == [(Outsider(pid=NOBODY, size_bytes=30),)], "its number is another's now"


async def test_nothing_is_said_before_the_pool_has_or_while_it_is_away(machine: Machine) -> None:
    assert await machine.looks(4, None) == []
    assert await machine.looks() == [()]
    machine.processes = {8: 50}
    assert await machine.looks(4, None) == [], "the next daemon"
    assert await machine.looks(4, replace(POOL, pid=8)) == []


async def test_whoever_finds_no_room_has_it_told_at_once(machine: Machine) -> None:
    await machine.looks()
    machine.processes[NOBODY] = 500
    await machine.books.doubt()
    assert machine.reports[-1] == ReportForeign(node="n1", device=GPU, processes=(Outsider(pid=NOBODY, size_bytes=500),))


async def test_a_driver_that_hangs_keeps_nobody_from_saying_that_there_was_no_room(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.looks()
    answers = threading.Event()
    monkeypatch.setattr(devicebooks, "DOUBT_S", 0.05)
    monkeypatch.setattr(gpus, "used_bytes", lambda _: answers.wait(30))
    async with asyncio.timeout(20):
        await machine.books.doubt()
    assert not answers.is_set()
    answers.set()


async def test_an_engine_that_came_during_a_look_is_ours_whatever_that_look_has_seen(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.looks()
    listed, there, gate = gpus.processes, threading.Event(), threading.Event()

    def held(device: str) -> dict[int, int]:
        seen = dict(listed(device) or {})
        there.set()
        assert gate.wait(20)
        return seen

    monkeypatch.setattr(gpus, "processes", held)
    early = asyncio.create_task(machine.books.measure(POOL))
    assert await asyncio.to_thread(there.wait, 20)
    monkeypatch.setattr(gpus, "processes", listed)
    machine.engine(NOBODY)
    await machine.books.doubt()
    gate.set()
    await early
    machine.engines = []  # it has ended, and the driver lists it for a moment more
    assert await machine.looks(5) == []
