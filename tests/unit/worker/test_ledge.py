"""Where an instance stays that could not get to where it was directed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from controlplane.fleet import REBUILD
from controlplane.rungs import NOT_CHECKPOINTABLE, Rung
from tests.unit.worker.test_plan import ASLEEP, rebuild
from worker.desired import Wanted
from worker.failure import StepFailed
from worker.ledge import Ledge, ledge
from worker.local import LocalInstance
from worker.moves import EngineState, StepName
from worker.plan import plan


def asleep() -> LocalInstance:
    return cast(LocalInstance, SimpleNamespace(lost=None, seen=replace(ASLEEP, grant=7, sought=True)))


def told(rung: Rung, code: str) -> Wanted:
    wanted = rebuild()
    assert wanted.directive is not None
    return replace(wanted, directive=replace(wanted.directive, rung=rung, code=code))


@pytest.mark.parametrize("code", [REBUILD, "idle", "operator"])
@pytest.mark.parametrize(("step", "failure"), [(StepName.BUILD, "no_memory"), (StepName.STAGE, "over_budget")])
async def test_an_image_that_there_is_no_room_to_make_leaves_its_skeleton_asleep(
    code: str, step: StepName, failure: str
) -> None:
    wanted = told(Rung.SLEEP if code == REBUILD else Rung.SAVED, code)
    found = await ledge(asleep(), wanted, step, StepFailed(failure, "so"))
    assert found is not None and found.rung is Rung.SLEEP
    moves = plan(found.aim(wanted), asleep().seen)
    assert [move.step for move in moves] == [StepName.DROP_CELLS], "and it is not begun again"


@pytest.mark.parametrize(("code", "stays"), [("operator", True), ("idle", True), ("evicted", False)])
async def test_a_gang_that_can_not_let_go_sleeps_on_unless_its_place_is_wanted(code: str, stays: bool) -> None:
    wanted = told(Rung.CHECKPOINT, code)
    found = await ledge(asleep(), wanted, StepName.CHECKPOINT, StepFailed(NOT_CHECKPOINTABLE, "so"))
    assert (found.rung if found is not None else None) == (Rung.SLEEP if stays else None)


@pytest.mark.parametrize("failure", ["no_space", "over_quota"])
@pytest.mark.parametrize("code", [REBUILD, "operator", "idle"])
async def test_an_image_that_the_disk_has_no_room_for_leaves_its_skeleton_asleep(code: str, failure: str) -> None:
    wanted = told(Rung.SLEEP if code == REBUILD else Rung.SAVED, code)
    found = await ledge(asleep(), wanted, StepName.BUILD, StepFailed(failure, "so"))
    assert found is not None and found.rung is Rung.SLEEP
    moves = plan(found.aim(wanted), asleep().seen)
    assert [move.step for move in moves] == [StepName.DROP_CELLS], "and it is not begun again"


@pytest.mark.parametrize("failure", ["no_space", "over_quota"])
@pytest.mark.parametrize("code", ["operator", "idle"])
async def test_an_image_that_the_disk_has_no_room_for_leaves_one_that_is_off_its_device_there(code: str, failure: str) -> None:
    off = asleep()
    off.seen = replace(off.seen, engine=EngineState.CHECKPOINTED)
    wanted = told(Rung.SAVED, code)
    found = await ledge(off, wanted, StepName.BUILD, StepFailed(failure, "so"))
    assert found is not None and found.rung is Rung.CHECKPOINT
    assert [move.step for move in plan(found.aim(wanted), off.seen)] == [StepName.DROP_CELLS], "and it waits for nothing"


@pytest.mark.parametrize(("engine", "rung"), [(EngineState.CONNECTED, Rung.SLEEP), (EngineState.CHECKPOINTED, Rung.CHECKPOINT)])
@pytest.mark.parametrize("code", [REBUILD, "operator", "idle"])
@pytest.mark.parametrize("step", [StepName.SEEK, StepName.BUILD])
async def test_one_that_another_version_has_started_stays_as_it_is(
    engine: EngineState, rung: Rung, code: str, step: StepName
) -> None:
    there = asleep()
    there.seen = replace(there.seen, engine=engine)
    wanted = told(Rung.SLEEP if code == REBUILD else Rung.SAVED, code)
    found = await ledge(there, wanted, step, StepFailed("engine_outdated", "so"))
    assert found is not None and found.rung is rung
    assert [move.step for move in plan(found.aim(wanted), there.seen)] == [StepName.DROP_CELLS]


@pytest.mark.parametrize(
    ("rung", "code", "step", "failure"),
    [
        (Rung.SAVED, "evicted", StepName.SEEK, "engine_outdated"),
        (Rung.SAVED, "evicted", StepName.BUILD, "over_quota"),
        (Rung.SLEEP, REBUILD, StepName.STAGE, "no_space"),
        (Rung.SLEEP, REBUILD, StepName.BUILD, "dump_failed"),
        (Rung.SAVED, "evicted", StepName.BUILD, "no_memory"),
        (Rung.SAVED, "evicted", StepName.STAGE, "over_budget"),
        (Rung.SLEEP, REBUILD, StepName.STAGE, "weights_unusable"),
        (Rung.UP, "request", StepName.STAGE, "over_budget"),
    ],
)
async def test_what_is_no_want_of_room_or_leaves_a_device_for_others_is_its_end(
    rung: Rung, code: str, step: StepName, failure: str
) -> None:
    assert await ledge(asleep(), told(rung, code), step, StepFailed(failure, "so")) is None


def test_where_it_stays_it_is_not_told_to_make_its_image_anew() -> None:
    aimed: Any = Ledge(1, Rung.SLEEP, StepFailed("no_memory", "so")).aim(rebuild())
    assert aimed.directive.code == "no_memory"
