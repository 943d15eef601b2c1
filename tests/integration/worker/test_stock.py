"""Models and weight sets of a node: inspected, staged, dropped."""

from controlplane.commands import RegisterModel, RetireModel, Sleep, Tick
from controlplane.events import InstanceEnded, ModelRejected, WeightsDropped, WeightsStaged
from controlplane.rungs import Rung
from controlplane.spec import ModelFacts, ModelSpec
from tests.workshop import MIB, Plant
from worker.failure import StepFailed
from worker.shelf import ProgressCall


async def test_a_retired_models_weights_leave_the_pool_once_nobody_maps_them(plane: Plant) -> None:
    await plane.register("a")
    await plane.load("a")
    weight_set = plane.of_type(WeightsStaged)[-1].weight_set
    plane.order(RetireModel(model="a"))
    await plane.until(lambda: plane.of_type(InstanceEnded))
    plane.order(Tick())
    await plane.until(lambda: plane.of_type(WeightsDropped))
    assert plane.of_type(WeightsDropped)[-1].weight_set == weight_set
    described = await plane.worker.shelf.described()
    assert described is not None
    assert described.sets == ()


async def test_a_set_is_staged_once_and_told_once_per_model(plane: Plant) -> None:
    await plane.register("a")
    await plane.load("a")
    await plane.restart_worker()
    assert len(plane.of_type(WeightsStaged)) == 1


async def test_a_source_that_can_not_be_used_is_reported_with_its_reason(plane: Plant) -> None:
    async def refuse(model: object, progress: ProgressCall) -> tuple[object, ModelFacts]:
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
