"""The fold of a node's events: from the plane's state and from the events alone it gives the same."""

from controlplane.envelope import Recorded
from controlplane.events import (
    AnyEvent,
    GrantGiven,
    GrantReturned,
    ImageRoomFound,
    InstanceCheckpointed,
    InstanceCreated,
    InstanceDirected,
    InstanceEnded,
    InstanceSaved,
    InstanceSlept,
    InstanceUp,
    ModelCleared,
    ModelInspected,
    ModelRegistered,
    ModelRejected,
    ModelRevised,
    WeightsDismissed,
    WeightsDropped,
    WeightsStaged,
)
from controlplane.fleet import Fleet, evolve
from controlplane.rungs import Rung
from controlplane.spec import ModelFacts, ModelSpec
from worker.desired import Desired

SPEC = ModelSpec(name="a", source="fake:a", engine="fake")
FACTS = ModelFacts(configuration="cfg_1", architecture="fake", weight_bytes=1, kv_bytes=1, context_tokens=10)
HISTORY: list[AnyEvent] = [
    ModelRegistered(model="a", spec=SPEC),
    ModelInspected(model="a", revision=1, inspected_by="n1", facts=FACTS),
    WeightsStaged(node="n1", weight_set="ws_1", model="a", revision=1, size_bytes=1, took_ms=1),
    InstanceCreated(node="n1", instance="ins_1", configuration="cfg_1"),
    GrantGiven(node="n1", device="d", instance="ins_1", offset=0, cells=4),
    InstanceDirected(node="n1", instance="ins_1", rung=Rung.UP, model="a", revision=1, grant=5),
    InstanceUp(
        node="n1", instance="ins_1", directive=6, model="a", revision=1, weight_set="ws_1", grant=5, endpoint="e", pid=1,
        took_ms=1, bytes_mapped=1, bytes_used=2,
    ),
    InstanceDirected(node="n1", instance="ins_1", rung=Rung.SLEEP),
    InstanceSlept(node="n1", instance="ins_1", directive=8, pid=1, took_ms=1, bytes_used=1, code="no_space", message="so"),
    GrantReturned(node="n1", device="d", instance="ins_1", grant=5),
    ImageRoomFound(node="n1", instance="ins_1"),
    InstanceDirected(node="n1", instance="ins_1", rung=Rung.CHECKPOINT, code="over_quota"),
    InstanceCheckpointed(node="n1", instance="ins_1", directive=12, pid=1, took_ms=1, host_bytes=1, code="over_quota"),
    InstanceDirected(node="n1", instance="ins_1", rung=Rung.SLEEP, code="engine_outdated"),
    InstanceSlept(node="n1", instance="ins_1", directive=14, pid=1, took_ms=1, bytes_used=1, code="engine_outdated"),
    InstanceDirected(node="n1", instance="ins_1", rung=Rung.SAVED),
    InstanceSaved(node="n1", instance="ins_1", directive=16, image="img_1", took_ms=1),
    WeightsDismissed(node="n1", weight_set="ws_1", code="room"),
]  # fmt: skip


def recorded(position: int, event: AnyEvent) -> Recorded:
    return Recorded(
        position=position, stream=event.stream, version=position, at_ms=0, command=f"cmd_{position}", ordinal=0, event=event
    )


def played(*events: AnyEvent) -> Desired:
    desired = Desired(node="n1")
    for position, event in enumerate(events, 1):
        desired = desired.after(recorded(position, event))
    return desired


def test_following_gives_what_the_planes_state_gives_at_every_position() -> None:
    fleet, desired = Fleet(), Desired(node="n1")
    for position, event in enumerate(HISTORY, 1):
        fleet = evolve(fleet, recorded(position, event))
        desired = desired.after(recorded(position, event))
        fresh = Desired.of(fleet, "n1")
        assert desired.position == fresh.position
        assert desired.grants == fresh.grants
        assert desired.dismissed == fresh.dismissed
        assert desired.staged == fresh.staged
        assert {name: model.facts for name, model in desired.models.items()} == {
            name: model.facts for name, model in fresh.models.items()
        }
        for name, known in fresh.instances.items():
            mine = desired.instances[name]
            assert (mine.directive, mine.answered, mine.reached) == (known.directive, known.answered, known.reached)
            assert mine.unsaved is known.unsaved


def test_an_older_event_again_changes_nothing() -> None:
    desired = played(*HISTORY)
    assert desired.after(recorded(6, HISTORY[5])) is desired


def test_another_nodes_instances_are_not_ours() -> None:
    fleet = Fleet()
    for position, event in enumerate(HISTORY, 1):
        fleet = evolve(fleet, recorded(position, event))
    assert not Desired.of(fleet, "n2").instances


def test_a_new_directive_is_unanswered_until_its_own_report() -> None:
    assert played(*HISTORY[:6]).instances["ins_1"].answered is False
    assert played(*HISTORY[:7]).instances["ins_1"].answered is True
    assert played(*HISTORY[:8]).instances["ins_1"].answered is False


def test_an_ended_instance_is_not_wanted_any_more() -> None:
    ended = InstanceEnded(node="n1", instance="ins_1", directive=8, took_ms=1)
    assert "ins_1" not in played(*HISTORY[:8], ended).instances


def test_a_dropped_set_is_neither_dismissed_nor_staged() -> None:
    desired = played(*HISTORY, WeightsDropped(node="n1", weight_set="ws_1", code="dismissed"))
    assert not desired.dismissed
    assert "ws_1" not in desired.staged


def test_a_hard_revision_must_be_inspected_anew_and_a_soft_one_not() -> None:
    soft = ModelRevised(model="a", spec=SPEC, revision=2, fields=("note",), hard=False)
    hard = ModelRevised(model="a", spec=SPEC, revision=2, fields=("source",), hard=True)
    assert played(*HISTORY, soft).models["a"].facts == FACTS
    assert played(*HISTORY, hard).models["a"].facts is None


def test_retry_forgets_a_rejection() -> None:
    rejected = ModelRejected(model="a", revision=1, code="weights_unusable", message="m")
    assert played(HISTORY[0], rejected).models["a"].rejection is not None
    assert played(HISTORY[0], rejected, ModelCleared(model="a")).models["a"].rejection is None
