"""The plan: from what is to what should be, and the same answer however things came to be."""

import pytest
from msgspec.structs import replace

from controlplane.fleet import REBUILD, Directive, Grant
from controlplane.rungs import Rung
from worker.desired import Wanted
from worker.moves import EngineState, Goal, Move, Observed, Served, StepName
from worker.plan import plan

A, B = Goal("a", 1), Goal("b", 1)
CONNECTED = Observed(present=True, holder=True, engine=EngineState.CONNECTED, frontend=True, prepared=A, staged=(A, "ws_a"))
UP = replace(
    CONNECTED, attached="ws_a", awake=True, woken_for=A, verified=False, checked=True, serving=Served("a", 1, 7), grant=7
)  # fmt: skip
ASLEEP = replace(CONNECTED, woken_for=A, checked=True, drained=True)


def wanted(rung: Rung, goal: Goal | None = None, grant: int | None = None) -> Wanted:
    directive = Directive(
        number=9, rung=rung, model=goal.model if goal else None, revision=goal.revision if goal else 0, grant=grant, code="",
        at_ms=0,
    )  # fmt: skip
    cells = Grant(number=grant, node="n1", device="d", instance="i", offset=0, cells=4, since_ms=0) if grant else None
    return Wanted(instance="i", configuration="c", directive=directive, grant=cells)


def steps(want: Wanted | None, seen: Observed) -> list[StepName]:
    return [move.step for move in plan(want, seen)]


UP_A = wanted(Rung.UP, A, 7)


def test_from_nothing_all_that_is_independent_begins_at_once() -> None:
    assert steps(UP_A, Observed()) == [StepName.PREPARE, StepName.START_FRONTEND, StepName.START_HOLDER]
    prepared = Observed(present=True, holder=True, prepared=A)
    assert steps(UP_A, prepared) == [StepName.STAGE, StepName.START_FRONTEND, StepName.START_ENGINE]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (replace(CONNECTED, engine=EngineState.STARTING), StepName.CONNECT),
        (CONNECTED, StepName.TAKE_CELLS),
        (replace(CONNECTED, grant=7), StepName.ATTACH),
        (replace(CONNECTED, grant=7, attached="ws_a"), StepName.WAKE),
        (replace(UP, checked=False, serving=None), StepName.CHECK),
        (replace(UP, serving=None), StepName.SERVE),
        (replace(UP, frontend=False, serving=None), StepName.START_FRONTEND),
        (replace(UP, serving=Served("a", 1, 6)), StepName.SERVE),
    ],
)
def test_a_climb_goes_on_from_wherever_it_is(seen: Observed, expected: StepName) -> None:
    assert steps(UP_A, seen) == [expected]


def test_there_is_nothing_to_do_when_it_is_there() -> None:
    assert plan(UP_A, UP) == ()
    assert plan(UP_A, replace(UP, prepared=None, staged=None)) == (), "adopted: neither source nor pool is needed to go on"
    assert plan(wanted(Rung.SLEEP), ASLEEP) == ()
    assert plan(wanted(Rung.COLD), Observed()) == ()
    assert plan(None, Observed()) == ()


def walk(want: Wanted, seen: Observed) -> list[StepName]:
    """Carry moves out as they would go, until there."""
    done = []
    while moves := plan(want, seen):
        for move in moves:
            done.append(move.step)
            seen = after(seen, move)
        assert len(done) < 30, done
    return done


def after(seen: Observed, move: Move) -> Observed:
    weights = {"a": "ws_a", "b": "ws_b"}
    changes: dict[StepName, dict[str, object]] = {
        StepName.PREPARE: {"prepared": move.goal},
        StepName.STAGE: {"staged": (move.goal, weights.get(move.goal.model if move.goal else "", ""))},
        StepName.START_FRONTEND: {"frontend": True, "serving": None},
        StepName.START_HOLDER: {"holder": True, "present": True},
        StepName.START_ENGINE: {"engine": EngineState.STARTING, "verified": not seen.own_layout},
        StepName.CONNECT: {"engine": EngineState.CONNECTED, "loaded": seen.own_layout},
        StepName.DEPOSIT: {
            "staged": (move.goal, weights.get(move.goal.model if move.goal else "", "")), "loaded": True, "verified": False,
        },
        StepName.TAKE_CELLS: {"grant": move.grant},
        StepName.ATTACH: {"attached": seen.staged[1] if seen.staged else None, "verified": False, "loaded": False},
        StepName.WAKE: {"awake": True, "woken_for": move.goal, "drained": False},
        StepName.CHECK: {"checked": True},
        StepName.SERVE: {"serving": move.goal and Served(move.goal.model, move.goal.revision, move.grant or 0)},
        StepName.STOP_SERVING: {"serving": None},
        StepName.DRAIN: {"drained": True},
        StepName.SLEEP: {"awake": False},
        StepName.DETACH: {"attached": None, "loaded": False},
        StepName.VERIFY: {"verified": True},
        StepName.DROP_CELLS: {"grant": None},
        StepName.SEEK: {"sought": True},
        StepName.CHECKPOINT: {"engine": EngineState.CHECKPOINTED},
        StepName.CUDA_RESTORE: {"engine": EngineState.CONNECTED},
        StepName.RESTORE: {"engine": EngineState.CHECKPOINTED},
        StepName.FILL: {"filled": seen.staged[1] if seen.staged else None},
        StepName.BUILD: {"kept": "img_1", "sought": True},
        StepName.END_ENGINE: {"engine": EngineState.DEAD, "awake": False, "attached": None, "serving": None},
    }  # fmt: skip
    return Observed() if move.step is StepName.CLEAR else replace(seen, **changes[move.step])


def test_a_switch_under_another_grant_gives_the_first_cells_up_before_it_takes_the_second() -> None:
    assert walk(wanted(Rung.UP, B, 8), UP) == [
        StepName.PREPARE, StepName.STAGE, StepName.STOP_SERVING, StepName.DRAIN, StepName.SLEEP, StepName.DETACH,
        StepName.VERIFY, StepName.DROP_CELLS, StepName.TAKE_CELLS, StepName.ATTACH, StepName.WAKE, StepName.SERVE,
    ]  # fmt: skip


def test_a_switch_under_one_grant_keeps_its_cells() -> None:
    assert walk(wanted(Rung.UP, B, 7), UP) == [
        StepName.PREPARE, StepName.STAGE, StepName.STOP_SERVING, StepName.DRAIN, StepName.SLEEP, StepName.DETACH,
        StepName.ATTACH, StepName.WAKE, StepName.SERVE,
    ]  # fmt: skip


def test_two_models_with_the_same_bytes_are_not_mapped_anew() -> None:
    seen = replace(UP, prepared=B, staged=(B, "ws_a"))
    assert walk(wanted(Rung.UP, B, 7), seen) == [
        StepName.STOP_SERVING, StepName.DRAIN, StepName.SLEEP, StepName.WAKE, StepName.SERVE,
    ]  # fmt: skip


def test_the_way_to_sleep_measures_before_it_gives_the_cells_up() -> None:
    assert walk(wanted(Rung.SLEEP), UP) == [
        StepName.STOP_SERVING, StepName.DRAIN, StepName.SLEEP, StepName.DETACH, StepName.VERIFY, StepName.DROP_CELLS,
    ]  # fmt: skip


def test_the_way_to_cold_drains_first() -> None:
    assert walk(wanted(Rung.COLD), UP) == [StepName.STOP_SERVING, StepName.DRAIN, StepName.END_ENGINE, StepName.CLEAR]
    assert walk(wanted(Rung.COLD), replace(CONNECTED, engine=EngineState.STARTING)) == [StepName.END_ENGINE, StepName.CLEAR]


def test_requests_of_a_dead_frontend_are_drained_through_a_new_one() -> None:
    assert steps(wanted(Rung.SLEEP), replace(UP, frontend=False, serving=None)) == [StepName.START_FRONTEND]


@pytest.mark.parametrize("seen", [Observed(), CONNECTED, UP, ASLEEP, replace(UP, awake=False), replace(UP, attached=None)])
@pytest.mark.parametrize("want", [UP_A, wanted(Rung.UP, B, 8), wanted(Rung.COLD)])
def test_every_directive_is_reached_from_everywhere(seen: Observed, want: Wanted) -> None:
    walk(want, seen)


# ---- a skeleton that brings its weights itself -----------------------------------------------------------------

NOTHING = Observed(present=True, holder=True, frontend=True, prepared=A, own_layout=True)
GPU_UP = replace(UP, own_layout=True)
GPU_ASLEEP = replace(ASLEEP, own_layout=True)


def test_cells_come_before_an_engine_that_uses_a_device_from_its_start_on() -> None:
    assert walk(UP_A, NOTHING) == [
        StepName.TAKE_CELLS, StepName.START_ENGINE, StepName.CONNECT, StepName.DEPOSIT, StepName.ATTACH, StepName.WAKE,
        StepName.CHECK, StepName.SERVE,
    ]  # fmt: skip


def test_weights_that_the_pool_has_in_the_skeletons_layout_are_not_brought_again() -> None:
    assert walk(UP_A, replace(NOTHING, staged=(A, "ws_a"))) == [
        StepName.TAKE_CELLS, StepName.START_ENGINE, StepName.CONNECT, StepName.ATTACH, StepName.WAKE, StepName.CHECK,
        StepName.SERVE,
    ]  # fmt: skip


def test_an_awake_skeleton_takes_other_weights_without_a_sleep() -> None:
    seen = replace(GPU_UP, prepared=B, staged=(B, "ws_b"))
    assert walk(wanted(Rung.UP, B, 7), seen) == [
        StepName.STOP_SERVING, StepName.DRAIN, StepName.ATTACH, StepName.WAKE, StepName.SERVE,
    ]  # fmt: skip


def test_weights_that_the_pool_lacks_are_brought_by_a_skeleton_that_sleeps_on_its_cells() -> None:
    seen = replace(GPU_UP, prepared=B, staged=None)
    assert walk(wanted(Rung.UP, B, 7), seen) == [
        StepName.STOP_SERVING, StepName.DRAIN, StepName.SLEEP, StepName.DETACH, StepName.DEPOSIT, StepName.ATTACH,
        StepName.WAKE, StepName.SERVE,
    ]  # fmt: skip
    assert walk(wanted(Rung.UP, B, 8), replace(GPU_ASLEEP, prepared=B, staged=None)) == [
        StepName.TAKE_CELLS, StepName.DEPOSIT, StepName.ATTACH, StepName.WAKE, StepName.SERVE,
    ]  # fmt: skip


def test_a_set_that_left_the_pool_meanwhile_is_brought_again() -> None:
    assert steps(UP_A, replace(GPU_ASLEEP, grant=7, staged=None)) == [StepName.DEPOSIT]


def test_weights_of_its_own_are_given_up_before_the_cells_are() -> None:
    loaded = replace(GPU_ASLEEP, grant=7, loaded=True, verified=False)
    down = [StepName.DETACH, StepName.VERIFY, StepName.DROP_CELLS]
    assert walk(wanted(Rung.SLEEP), loaded) == down
    assert walk(wanted(Rung.UP, A, 8), loaded)[:4] == [*down, StepName.TAKE_CELLS]


@pytest.mark.parametrize("staged", [None, (A, "ws_a"), (B, "ws_b")])
@pytest.mark.parametrize(
    "seen",
    [NOTHING, GPU_UP, GPU_ASLEEP, replace(GPU_UP, awake=False), replace(GPU_ASLEEP, loaded=True, grant=7, verified=False)],
)
@pytest.mark.parametrize("want", [UP_A, wanted(Rung.UP, B, 7), wanted(Rung.UP, B, 8), wanted(Rung.COLD)])
def test_every_directive_is_reached_by_a_skeleton_on_a_device(
    seen: Observed, want: Wanted, staged: tuple[Goal, str] | None
) -> None:
    walk(want, replace(seen, staged=staged))


def rebuild(answered: bool = False) -> Wanted:
    want = wanted(Rung.SLEEP, A, 8)
    assert want.directive is not None
    return replace(want, directive=replace(want.directive, code=REBUILD), answered=answered)


def test_a_sleeper_makes_its_image_anew_on_its_cells_and_gives_them_back() -> None:
    assert walk(rebuild(), ASLEEP) == [StepName.SEEK, StepName.TAKE_CELLS, StepName.BUILD, StepName.DROP_CELLS]
    assert plan(rebuild(answered=True), ASLEEP) == (), "told already: a new worker does not begin again"
    assert plan(rebuild(), replace(ASLEEP, sought=True, kept="img")) == (), "one was there"
