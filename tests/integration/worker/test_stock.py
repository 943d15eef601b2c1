"""Models and weight sets of a node: inspected, staged, dropped."""

import json
from pathlib import Path

import pytest

from controlplane.commands import RegisterModel, RetireModel, Sleep, Tick
from controlplane.events import InstanceEnded, InstanceFailed, ModelRejected, WeightsDropped, WeightsStaged
from controlplane.fleet import Fleet
from controlplane.rungs import Rung
from controlplane.spec import ModelSpec
from tests.workshop import MIB, Plant, plant
from worker import preparedcopies, processes
from worker.failure import StepFailed
from worker.frontend.chat import FAKE
from worker.shelf import ProgressCall
from worker.sources import Prepared


async def test_a_retired_models_weights_leave_the_pool_once_nobody_maps_them(plane: Plant) -> None:
    await plane.register("a")
    await plane.load("a")
    weight_set = plane.of_type(WeightsStaged)[-1].weight_set
    plane.order(RetireModel(model="a"))
    await plane.until(lambda: plane.of_type(InstanceEnded))
    plane.order(Tick())
    await plane.until(lambda: plane.of_type(WeightsDropped))
    assert plane.of_type(WeightsDropped)[-1].weight_set == weight_set
    described = await plane.worker.shelf.described(deadline_s=30)
    assert described is not None
    assert described.sets == ()


async def test_a_retired_models_source_leaves_the_disk_once_no_engine_was_started_with_it(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch)
    await plane.register("a")
    await plane.register("b")
    up = await plane.load("a")
    (of_a,) = [path for path in (plane.data / "models").glob("fake-*") if name_of_fake(path) == "a"]
    plane.order(Sleep(model="a"))
    await plane.until(lambda: plane.only().rung is Rung.SLEEP and plane.only().directive_settled)
    plane.order(RetireModel(model="a"))
    plane.order(Tick())
    await plane.restart_worker()
    assert plane.only().pid == up.pid and of_a.is_dir(), "its skeleton is b's, too, and was started with it"
    plane.order(RetireModel(model="b"))
    plane.order(Tick())
    await plane.until(lambda: plane.of_type(InstanceEnded))
    await plane.until(lambda: not list((plane.data / "models").glob("*fake-*")))


async def test_what_a_dead_worker_left_to_be_removed_is_removed_by_the_next(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await plane.register("a")
    await plane.worker.vanish()
    plane.fleet = Fleet()
    at_once(monkeypatch)
    await plane.restart_worker()
    await plane.until(lambda: not list((plane.data / "models").glob("*fake-*")))


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparedcopies, "GRACE_S", 0.0)
    monkeypatch.setattr(preparedcopies, "PAUSE_S", 0.0)


def name_of_fake(source: Path) -> str:
    return str(json.loads((source / FAKE).read_text())["name"])


async def test_a_set_is_staged_once_and_told_once_per_model(plane: Plant) -> None:
    await plane.register("a")
    await plane.load("a")
    await plane.restart_worker()
    assert len(plane.of_type(WeightsStaged)) == 1


async def test_a_source_that_can_not_be_used_is_reported_with_its_reason(plane: Plant) -> None:
    async def refuse(model: object, progress: ProgressCall) -> Prepared:
        raise StepFailed("bad_source", "config.json is missing")

    plane.worker.shelf._prepare = refuse  # type: ignore[assignment]
    plane.order(RegisterModel(spec=ModelSpec(name="bad", source="fake:bad", engine="fake", cells=1)))
    await plane.until(lambda: plane.of_type(ModelRejected))
    rejected = plane.of_type(ModelRejected)[-1]
    assert (rejected.code, rejected.message) == ("bad_source", "config.json is missing")


async def test_a_set_that_left_the_pool_behind_our_back_is_staged_again(plane: Plant) -> None:
    await plane.register("a", kv_bytes=MIB)
    up = await plane.load("a")
    plane.order(Sleep(model="a"))
    await plane.until(lambda: plane.only().rung is Rung.SLEEP)
    assert await plane.worker.shelf.dropped(up.weight_set)
    again = await plane.load("a")
    assert again.pid == up.pid


async def test_n16_a_full_pool_lets_the_least_valuable_set_go_and_nothing_is_killed() -> None:
    """Room for two sets of 4 MiB: the one that was used last, and the one that is mapped, stay."""
    async with plant(pool_bytes=10 * MIB) as plane:
        pids = {}
        for name in ("a", "b"):
            await plane.register(name, cells=1, kv_bytes=MIB)
            pids[name] = (await plane.load(name)).pid
            plane.order(Sleep(model=name))
            await plane.until(lambda: all(i.rung is Rung.SLEEP for i in plane.fleet.instances.values()))
        oldest = plane.of_type(WeightsStaged)[0].weight_set
        used = (await plane.load("b")).weight_set
        await plane.register("c", cells=1, kv_bytes=2 * MIB)
        third = await plane.load("c")
        assert [event.weight_set for event in plane.of_type(WeightsDropped)] == [oldest]
        described = await plane.worker.shelf.described(deadline_s=30)
        assert described is not None
        assert {known.weight_set for known in described.sets} == {used, third.weight_set}
        assert plane.pool is not None
        assert processes.alive(plane.pool)
        assert plane.up("b").pid == pids["b"]
        plane.order(Sleep(model="c"))
        await plane.until(lambda: plane.up("c") is None)
        again = await plane.load("a")
        assert again.pid == pids["a"], "its skeleton slept on; its weights were read again"
        assert plane.of_type(InstanceFailed) == []
