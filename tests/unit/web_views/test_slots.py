"""The slot map tells who holds which cells, and whose bytes fill a device."""

import pytest
from msgspec.structs import replace

from controlplane.events import (
    ForeignMemoryFound,
    GrantReturned,
    InstanceOverdue,
    NodeFellSilent,
    NodeLeft,
    OperationRequested,
    Outsider,
)
from controlplane.spec import CELLS
from controlplane.subjects import DeviceBytes, InstanceBeat, NodeBeat, Progress
from tests.busyplane import busy
from tests.staged import GIB, MIB, StagedPlane
from web.views.slots import Free, Held, described, devices, free_runs

NOW = 1_800_000_000_000


@pytest.mark.parametrize(
    ("taken", "free"),
    [
        (set(), [(0, 8)]),
        (set(range(8)), []),
        ({0}, [(1, 1), (2, 2), (4, 4)]),
        ({0, 1, 2, 3}, [(4, 4)]),
        ({7}, [(0, 4), (4, 2), (6, 1)]),
        ({3, 4}, [(0, 2), (2, 1), (5, 1), (6, 2)]),
    ],
)
def test_free_cells_are_shown_as_the_largest_grants_that_fit(taken: set[int], free: list[tuple[int, int]]) -> None:
    assert free_runs(taken) == free


@pytest.mark.parametrize("bits", range(256))
def test_free_runs_and_taken_cells_cover_the_device_once(bits: int) -> None:
    taken = {cell for cell in range(CELLS) if bits >> cell & 1}
    cells = [cell for offset, n in free_runs(taken) for cell in range(offset, offset + n)]
    assert sorted([*cells, *taken]) == list(range(CELLS))
    assert all(offset % n == 0 for offset, n in free_runs(taken))


def test_a_holder_is_drawn_with_its_model_rung_and_speed() -> None:
    plane = busy(StagedPlane(NOW))
    view = devices(plane.fleet, plane.beats)[0]
    held, free = view.runs
    assert isinstance(held, Held)
    assert (held.model, held.offset, held.cells, held.standing.tone, held.running) == ("smollm2-135m", 0, 4, "up", 2)
    assert held.label == "smollm2-135m on ½ of cpu0, up, 2 running, 41 tokens a second"
    assert free == Free(offset=4, cells=4, size_bytes=GIB // 2)
    assert view.granted_cells == 4


def test_a_climb_shows_its_step_and_how_far_it_is() -> None:
    plane = busy(StagedPlane(NOW))
    held = next(r for r in devices(plane.fleet, plane.beats)[1].runs if isinstance(r, Held) and r.model == "smollm2-sailor")
    assert (held.standing.tone, held.standing.words, held.standing.since_ms) == ("climb", "starting", NOW - 4_100)
    assert held.standing.progress is not None
    assert (held.standing.progress.step, held.standing.progress.total) == ("map weights", 258 * MIB)


def test_progress_never_exceeds_its_total() -> None:
    plane = busy(StagedPlane(NOW))
    beat = NodeBeat(
        node="n1", incarnation="i", at_ms=NOW, pool_used_bytes=0, pool_budget_bytes=1, pool_ok=True, device_bytes={},
        progress=(Progress(subject="ins_01JDXB4M9S7QKC2W5T8B", step="map_weights", done=300, total=200),),
    )  # fmt: skip
    plane.beat(beat)
    held = next(r for r in devices(plane.fleet, plane.beats)[1].runs if isinstance(r, Held) and r.model == "smollm2-sailor")
    assert held.standing.progress is not None
    assert held.standing.progress.done == 200


def test_bytes_are_told_by_owner_and_add_up_to_the_device() -> None:
    plane = busy(StagedPlane(NOW))
    view = devices(plane.fleet, plane.beats)[0]
    assert {s.kind: s.size_bytes for s in view.segments} == {
        "mapped": 258 * MIB, "private": 163 * MIB, "others": 45 * MIB, "free": GIB - 466 * MIB,
    }  # fmt: skip
    assert described(view).startswith("Bytes on cpu0: mapped weights 258 MiB, private 163 MiB")


def test_bytes_beyond_the_device_do_not_overflow_the_bar() -> None:
    plane = busy(StagedPlane(NOW))
    told = InstanceBeat(instance="ins_01JDXB4M9S7QKC2W5T8A", running=0, tokens_per_s=0, bytes_used=9 * GIB)
    plane.beat(
        NodeBeat(
            node="n1",
            incarnation="i",
            at_ms=NOW,
            pool_used_bytes=0,
            pool_budget_bytes=1,
            pool_ok=True,
            device_bytes={"dev-n1-cpu0": 9 * GIB},
            instances=(told,),
        )
    )
    segments = devices(plane.fleet, plane.beats)[0].segments
    assert sum(s.width for s in segments) <= 100.01
    assert all(s.left + s.width <= 100.01 and s.size_bytes >= 0 for s in segments)


def test_a_silent_node_and_an_overdue_transition_are_marked() -> None:
    plane = busy(StagedPlane(NOW))
    instance = plane.fleet.instances["ins_01JDXB4M9S7QKC2W5T8B"]
    assert instance.directive is not None
    plane.emit(InstanceOverdue(node="n1", instance=instance.instance, directive=instance.directive.number, waited_ms=90_000))
    held = next(r for r in devices(plane.fleet, plane.beats)[1].runs if isinstance(r, Held) and r.model == "smollm2-sailor")
    assert held.standing.overdue
    plane.emit(NodeFellSilent(node="n1"))
    silent = devices(plane.fleet, plane.beats)[0]
    assert silent.away == "is silent"
    assert isinstance(silent.runs[0], Held)
    assert silent.runs[0].standing.words == "up, node is silent"
    plane.emit(NodeLeft(node="n1"))
    left = devices(plane.fleet, plane.beats)[0]
    assert left.away == "has left"
    assert isinstance(left.runs[0], Held)
    assert (left.runs[0].standing.tone, left.runs[0].standing.words) == ("cold", "up, node has left")


def test_returned_cells_are_free_again() -> None:
    plane = busy(StagedPlane(NOW))
    grant = next(g for g in plane.fleet.grants.values() if g.device == "dev-n1-cpu0")
    plane.emit(GrantReturned(node="n1", device=grant.device, instance=grant.instance, grant=grant.number))
    assert devices(plane.fleet, plane.beats)[0].runs == (Free(offset=0, cells=8, size_bytes=GIB),)


def test_memory_of_others_has_an_owner_of_its_own_on_a_gpus_bar() -> None:
    plane = StagedPlane(NOW)
    plane.node()
    gpu = plane.device("gpu0", kind="gpu")
    plane.emit(ForeignMemoryFound(node="n1", device=gpu, processes=(Outsider(pid=4711, size_bytes=300 * MIB, name="python3"),)))
    owners = DeviceBytes(skeletons=100 * MIB, pool_context=50 * MIB, foreign={12: 9 * MIB, 4711: 300 * MIB})
    plane.beat(
        NodeBeat(
            node="n1", incarnation="i", at_ms=NOW, pool_used_bytes=0, pool_budget_bytes=1, pool_ok=True,
            device_bytes={gpu: owners.total}, owners={gpu: owners},
        )
    )  # fmt: skip
    (shown,) = devices(plane.fleet, plane.beats)
    foreign = next(s for s in shown.segments if s.kind == "foreign")
    assert (foreign.words, foreign.size_bytes) == ("not this plane's (pid 4711 python3, pid 12)", 309 * MIB)
    assert "not this plane's (pid 4711 python3, pid 12) 309 MiB" in described(shown)
    plane.beat(replace(plane.beats["n1"], owners={gpu: replace(owners, foreign={})}))
    assert "foreign" not in {s.kind for s in devices(plane.fleet, plane.beats)[0].segments}


@pytest.mark.parametrize("beats", [True, False])
def test_what_moves_is_drawn_with_its_bytes_where_it_is_and_as_a_promise_where_it_goes(beats: bool) -> None:
    plane = busy(StagedPlane(NOW))
    moves = plane.fleet.grants[next(r.grant for r in devices(plane.fleet, {})[0].runs if isinstance(r, Held))]
    target = plane.device("cpu2")
    operation = plane.emit(OperationRequested(operation="op_1", kind="move", model="smollm2-135m"), operation="op_1")
    plane.climb(moves.instance, "smollm2-135m", target, 0, 4, operation=operation.operation)
    source, goal = (
        next(d for d in devices(plane.fleet, plane.beats if beats else {}) if d.name == name) for name in ("cpu0", "cpu2")
    )
    (left,), (taken,) = ([r for r in d.runs if isinstance(r, Held)] for d in (source, goal))
    assert (left.standing.words, taken.standing.words, left.place, taken.place) == ("moving", "moving", "", "moves here")
    assert (left.running, taken.running, left.bytes_used, taken.bytes_used) == (2, 0, 421 * MIB, 0)
    assert taken.label == "smollm2-135m on ½ of cpu2, moving, moves here"
    assert [s.size_bytes for s in source.segments[:2]] == [258 * MIB, 163 * MIB]
    assert [s.size_bytes for s in goal.segments if s.kind != "free"] == [0] * (len(goal.segments) - 1)
