"""The plan on the rungs below sleep: off the GPU, back on it, and what goes on at the same time."""

import pytest
from msgspec.structs import replace

from controlplane.fleet import Grant
from controlplane.rungs import Rung
from tests.unit.worker.test_plan import ASLEEP, CONNECTED, UP, UP_A, A, steps, walk, wanted
from worker.cuda.surgeon import exchanged
from worker.moves import EngineState, Observed, StepName
from worker.plan import plan

OFF = replace(ASLEEP, engine=EngineState.CHECKPOINTED, own_layout=True)
"""Taken off its GPU; its weights are in the pool."""
OFF_UNKNOWN = replace(OFF, prepared=None, staged=None)
SAVED = Observed(prepared=A, staged=(A, "ws_a"), own_layout=True, image="img_1", present=True, holder=True)
"""On disk: its holder has just been started."""


def test_it_goes_off_its_device_from_wherever_it_is_and_drains_first() -> None:
    assert walk(wanted(Rung.CHECKPOINT), UP) == [
        StepName.STOP_SERVING, StepName.DRAIN, StepName.SLEEP, StepName.DETACH, StepName.VERIFY, StepName.CHECKPOINT,
        StepName.DROP_CELLS,
    ]  # fmt: skip
    assert walk(wanted(Rung.CHECKPOINT), ASLEEP) == [StepName.CHECKPOINT]
    assert plan(wanted(Rung.CHECKPOINT), OFF) == ()


def test_the_grant_comes_before_the_first_byte_and_the_bytes_travel_while_the_process_comes_back() -> None:
    assert steps(UP_A, OFF) == [StepName.TAKE_CELLS]
    assert steps(UP_A, replace(OFF, grant=7)) == [StepName.CUDA_RESTORE, StepName.FILL]
    assert steps(UP_A, replace(OFF, grant=7, filled="ws_a")) == [StepName.CUDA_RESTORE]
    assert steps(UP_A, replace(OFF, grant=6)) == [StepName.DROP_CELLS], "another grant's cells are given up first"
    assert steps(UP_A, replace(CONNECTED, grant=7, own_layout=True, filled="ws_a")) == [StepName.ATTACH]


def test_a_gang_comes_back_first_and_its_ranks_have_their_parts_filled_when_they_attach() -> None:
    rank = Grant(number=7, node="n1", device="d0", instance="i", offset=0, cells=8, since_ms=0)
    gang = replace(UP_A, gang=(rank, replace(rank, number=8, device="d1", rank=1)))
    assert steps(gang, replace(OFF, grant=7)) == [StepName.CUDA_RESTORE]
    assert steps(gang, replace(CONNECTED, grant=7, own_layout=True)) == [StepName.ATTACH]


def test_from_the_disk_the_pool_fills_the_device_while_the_process_is_restored() -> None:
    assert steps(UP_A, replace(SAVED, frontend=True)) == [StepName.TAKE_CELLS]
    assert steps(UP_A, replace(SAVED, frontend=True, grant=7)) == [StepName.RESTORE, StepName.FILL]
    restored = replace(SAVED, frontend=True, grant=7, filled="ws_a", engine=EngineState.CHECKPOINTED)
    assert steps(UP_A, restored) == [StepName.CUDA_RESTORE]
    assert steps(UP_A, replace(SAVED, frontend=True, grant=7, image=None)) == [StepName.START_ENGINE], (
        "no image: nothing to fill for"
    )


def test_whoever_waits_comes_from_the_disk_as_far_as_needs_no_device() -> None:
    want = wanted(Rung.CHECKPOINT, A)
    assert steps(want, Observed()) == [StepName.PREPARE, StepName.START_HOLDER]
    assert walk(want, replace(SAVED, staged=None, own_layout=False)) == [StepName.STAGE, StepName.RESTORE]
    assert plan(want, replace(SAVED, engine=EngineState.CHECKPOINTED)) == ()


def test_a_checkpointed_engine_goes_to_disk_without_coming_back_first() -> None:
    want = wanted(Rung.SAVED, A, 7)
    assert steps(want, OFF) == [StepName.SEEK]
    assert steps(want, replace(OFF, sought=True)) == [StepName.TAKE_CELLS]
    assert steps(want, replace(OFF, sought=True, grant=7)) == [StepName.BUILD]
    assert steps(want, replace(OFF, sought=True, grant=7, staged=None)) == [StepName.CUDA_RESTORE], (
        "its weights are not in the pool"
    )
    assert steps(want, replace(OFF, sought=True, kept="img_1")) == [StepName.END_ENGINE]


def test_weights_that_were_brought_for_the_proof_leave_the_engine_before_it_is_written() -> None:
    want = wanted(Rung.SAVED, A, 7)
    brought = replace(ASLEEP, sought=True, grant=7, own_layout=True, staged=None)
    assert steps(want, brought) == [StepName.DEPOSIT]
    loaded = replace(brought, staged=(A, "ws_a"), loaded=True, verified=False)
    assert walk(want, loaded)[:3] == [StepName.DETACH, StepName.VERIFY, StepName.BUILD]


@pytest.mark.parametrize("seen", [OFF, OFF_UNKNOWN, replace(OFF, grant=7)])
def test_it_is_asked_nothing_but_to_come_back_or_to_end(seen: Observed) -> None:
    asked = {StepName.DRAIN, StepName.SLEEP, StepName.DETACH, StepName.ATTACH, StepName.WAKE, StepName.CHECK, StepName.VERIFY}
    for want in (UP_A, wanted(Rung.CHECKPOINT), wanted(Rung.SAVED, A, 7), wanted(Rung.SLEEP), wanted(Rung.COLD), None):
        if want is not None and want.directive is not None and want.directive.rung is Rung.UP and seen.grant == 7:
            continue
        assert not asked & set(steps(want, seen)), want


def test_it_ends_at_once() -> None:
    assert walk(wanted(Rung.COLD), OFF) == [StepName.END_ENGINE, StepName.CLEAR]


def test_a_skeleton_on_another_gpu_is_taken_off_it_and_comes_back_on_the_one_of_its_cells() -> None:
    there = replace(UP, own_layout=True, device="old", grant=6)
    assert steps(UP_A, there) == [StepName.STOP_SERVING]
    idle = replace(there, serving=None, awake=False, attached=None, drained=True)
    assert steps(UP_A, idle) == [StepName.VERIFY]
    assert steps(UP_A, replace(idle, verified=True)) == [StepName.CHECKPOINT]
    off = replace(idle, verified=True, engine=EngineState.CHECKPOINTED)
    assert steps(UP_A, off) == [StepName.DROP_CELLS], "the old ones only when nothing of it is there any more"
    assert steps(UP_A, replace(off, grant=None)) == [StepName.TAKE_CELLS]
    assert steps(UP_A, replace(off, grant=7, device="d")) == [StepName.CUDA_RESTORE, StepName.FILL]
    assert steps(UP_A, replace(off, grant=7, device="d", engine=EngineState.CONNECTED, filled="ws_a")) == [StepName.ATTACH]


def test_a_skeleton_that_holds_no_gpu_just_changes_its_cells() -> None:
    there = replace(UP, grant=6)
    assert StepName.CHECKPOINT not in walk(UP_A, there)


def test_gpus_change_places_among_all_that_the_machine_has() -> None:
    assert exchanged("a", "b", ["a", "b", "c"]) == {"a": "b", "b": "a", "c": "c"}
    assert exchanged("a", "a", ["a", "b"]) == {}
    assert exchanged(None, "a", []) == {}
