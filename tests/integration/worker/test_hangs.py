"""Processes that are there and do nothing: seen within a deadline, killed, and then treated as any that died."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.commands import Checkpoint, Sleep
from controlplane.events import GrantReturned, InstanceFailed, InstanceUp
from controlplane.rungs import Rung
from tests.workshop import DEVICE, QUICK, Plant, plant
from worker import processes
from worker.processes import Process

HUNG_S = 2.5
SEEN_S = 30.0
"""From a freeze to the report: two questions, what a holder has beyond each, the end of every process; two busy cores."""


@pytest.fixture
async def plane() -> AsyncIterator[Plant]:
    async with plant() as made:
        made.deadlines = replace(QUICK, pulse=0.1, hung=HUNG_S)
        await made.restart_worker()
        yield made


@pytest.fixture
def freeze() -> Iterator[Any]:
    """Stop a process; whatever happens, none is left stopped."""
    frozen: list[Process] = []

    def stop(process: Process | None) -> Process:
        assert process is not None
        assert processes.send(process, signal.SIGSTOP)
        frozen.append(process)
        return process

    yield stop
    for process in frozen:
        processes.send(process, signal.SIGKILL)


async def failure(plane: Plant) -> InstanceFailed:
    (failed,) = await plane.until(lambda: plane.of_type(InstanceFailed), SEEN_S)
    assert isinstance(failed, InstanceFailed)
    return failed


def nothing_left(plane: Plant) -> None:
    assert plane.processes() == []
    assert list((plane.data / "run" / "inst").iterdir()) == []
    assert plane.worker.locks.holder(DEVICE, 0) is None


async def test_a_stream_of_an_engine_that_hangs_ends_and_the_instance_fails(plane: Plant, freeze: Any) -> None:
    await plane.register("a", tokens_per_s=5)
    up = await plane.load("a")
    lines = []
    async with asyncio.timeout(SEEN_S):
        async for line in plane.stream(up, "req_1", "x" * 50):
            lines.append(line)
            if len(lines) == 3:
                freeze(plane.record(up.instance).engine)
    assert (lines[-1]["t"], lines[-1]["code"]) == ("error", "engine_died")
    failed = await failure(plane)
    assert (failed.code, failed.rung, failed.step) == ("engine_hung", Rung.UP, "serve")
    assert plane.of_type(GrantReturned)
    nothing_left(plane)


async def test_an_engine_that_hangs_asleep_is_found(plane: Plant, freeze: Any) -> None:
    await plane.register("a")
    up = await plane.load("a")
    plane.order(Sleep(model="a"))
    await plane.until(lambda: (slept := plane.only()) and slept.rung is Rung.SLEEP)
    freeze(plane.record(up.instance).engine)
    failed = await failure(plane)
    assert (failed.code, failed.rung) == ("engine_hung", Rung.SLEEP)
    nothing_left(plane)


async def test_a_holder_that_hangs_is_ended_with_its_engine(plane: Plant, freeze: Any) -> None:
    await plane.register("a")
    up = await plane.load("a")
    freeze(plane.record(up.instance).holder)
    failed = await failure(plane)
    assert (failed.code, failed.rung) == ("holder_died", Rung.UP)
    assert "hangs" in failed.message
    nothing_left(plane)


async def test_a_holder_that_hangs_while_its_engine_is_off_its_device_is_found_though_nobody_asks_for_it(
    plane: Plant, freeze: Any
) -> None:
    await plane.register("a", gpu=True)
    up = await plane.load("a")
    plane.order(Checkpoint(model="a"))
    await plane.until(lambda: (off := plane.only()) and off.rung is Rung.CHECKPOINT)
    freeze(plane.record(up.instance).holder)
    failed = await failure(plane)
    assert (failed.code, failed.rung) == ("holder_died", Rung.CHECKPOINT)
    assert "hangs" in failed.message
    nothing_left(plane)


async def test_a_frontend_that_hangs_is_replaced_on_its_port_and_nothing_fails(plane: Plant, freeze: Any) -> None:
    await plane.register("a")
    up = await plane.load("a")
    before = plane.record(up.instance)
    hung = freeze(before.frontend)
    await plane.until(lambda: not processes.alive(hung), SEEN_S)
    keeper = plane.worker.reconciler.keepers[up.instance]
    await plane.until(lambda: plane.record(up.instance).frontend != hung and keeper.local.seen.serving)
    after = plane.record(up.instance)
    assert (after.port, after.engine) == (before.port, before.engine)
    assert (await plane.generate(up, "req_1", "hi"))[-1]["t"] == "end"
    assert len(plane.of_type(InstanceUp)) == 1
    assert plane.of_type(InstanceFailed) == []


async def test_an_engine_that_answers_late_but_in_time_is_let_alone(plane: Plant, freeze: Any) -> None:
    """As one does that is in the middle of a long step."""
    await plane.register("a")
    up = await plane.load("a")
    engine = freeze(plane.record(up.instance).engine)
    with pytest.raises(AssertionError, match="did not come"):
        await plane.until(lambda: plane.of_type(InstanceFailed), HUNG_S / 3)
    assert processes.send(engine, signal.SIGCONT)
    with pytest.raises(AssertionError, match="did not come"):
        await plane.until(lambda: plane.of_type(InstanceFailed), 2 * HUNG_S)
    assert (await plane.generate(up, "req_1", "hi"))[-1]["t"] == "end"
    assert plane.record(up.instance).engine == engine
