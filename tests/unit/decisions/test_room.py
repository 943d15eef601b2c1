"""Who makes room when a model lacks bytes of a device, or of the pool."""

from controlplane.commands import (
    Load,
    ReportDropped,
    ReportEnded,
    ReportStaged,
    Tick,
)
from controlplane.decisions.limits import BOUND_MS
from controlplane.rungs import Rung
from tests.unit.decisions.spec import DEVICE, plane, spec, with_models
from tests.unit.decisions.test_schedule import CLIMB, admit, done, evict


def staged(model: str, size: int) -> ReportStaged:
    return ReportStaged(node="n1", model=model, revision=1, weight_set=f"ws_{model}", size_bytes=size, took_ms=1)


def test_sleepers_go_cold_when_their_bytes_are_needed() -> None:
    """N15, where there is no rung between."""
    story = with_models(plane(), spec("a", size=600), spec("b", size=750)).bring_up("a")
    sleeper = story.instance_of("a").instance
    story.when(admit("req_1", "b"))
    story.report_slept(sleeper, bytes_used=100)
    story.then(
        "InstanceSlept", "GrantReturned", "SkeletonMeasured", ("InstanceDirected", {"instance": sleeper, "rung": Rung.COLD}),
        ("RequestQueued", {"code": "making_room"}),
    )  # fmt: skip
    story.when(Tick(), after_ms=10).then_nothing()
    number, _ = story.directive(sleeper)
    story.when(ReportEnded(node="n1", instance=sleeper, directive=number, took_ms=1))
    story.then("InstanceEnded", *CLIMB, ("RequestQueued", {"code": "climbing"}))


def test_unused_weights_leave_a_full_pool_and_used_ones_stay() -> None:
    """N16."""
    half = DEVICE // 2
    story = with_models(plane(devices=2, pool_bytes=1_000), *(spec(n, size=half) for n in "abc"))
    story.when(Load(model="a")).when(staged("a", half)).report_up("a")
    story.when(Load(model="b")).when(staged("b", half)).report_up("b").given(admit("req_b", "b"))
    story.when(admit("req_c", "c"), after_ms=5)
    story.then("RequestAccepted", ("InstanceDirected", {"code": "evicted"}), ("RequestQueued", {"code": "making_room"}))
    evict(story, "a").then("InstanceSlept", "GrantReturned", ("WeightsDismissed", {"weight_set": "ws_a", "need_bytes": half}))
    story.when(Tick(), after_ms=5).then_nothing()
    story.when(ReportDropped(node="n1", weight_set="ws_a", code="dismissed"))
    story.then("WeightsDropped", *CLIMB, ("RequestQueued", {"code": "climbing"}))


def test_a_pool_full_of_weights_in_use_lets_the_head_in_once_its_bound_has_passed() -> None:
    """N16, where nothing is idle."""
    half = DEVICE // 2
    story = with_models(plane(devices=2, pool_bytes=1_000), *(spec(n, size=half) for n in "abc"))
    for name in "ab":
        story.when(Load(model=name)).when(staged(name, half)).report_up(name)
        story.given(admit(f"req_{name}1", name)).given(admit(f"req_{name}2", name))
    story.when(admit("req_c", "c")).then("RequestAccepted", ("RequestQueued", {"code": "making_room"}))
    story.when(done("req_b1"), after_ms=BOUND_MS + 1)
    story.when(admit("req_b3", "b")).then("RequestAccepted", ("RequestQueued", {"code": "behind"}))
    story.when(admit("req_a3", "a")).then("RequestAccepted", "RequestRouted")
    story.when(done("req_b2")).then("RequestFinished", ("InstanceDirected", {"victim_of": "c"}), "RequestQueued")
    evict(story, "b").then("InstanceSlept", "GrantReturned", ("WeightsDismissed", {"weight_set": "ws_b"}), "RequestQueued")
    story.when(ReportDropped(node="n1", weight_set="ws_b", code="dismissed")).then("WeightsDropped", *CLIMB, "RequestQueued")
