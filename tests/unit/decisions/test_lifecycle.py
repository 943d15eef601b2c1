"""Reports, failures, timers: an instance's way up and down the ladder."""

from msgspec.structs import replace

from controlplane.commands import (
    Admit,
    End,
    EndRequests,
    Load,
    ReportDropped,
    ReportEnded,
    ReportFailed,
    ReportStaged,
    Retry,
    Sleep,
    Stop,
    Tick,
)
from controlplane.events import InstanceDirected, ModelSetBack
from controlplane.refusal import Code
from controlplane.rungs import Rung
from controlplane.spec import Idle
from tests.unit.decisions.spec import Story, plane, spec, with_models


def admit(request: str, model: str = "a") -> Admit:
    return Admit(request=request, model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9)


def done(request: str) -> EndRequests:
    return EndRequests(ends=(End(request=request, outcome="finished"),))


def failure(story: Story, model: str = "a", code: str = "start_failed") -> ReportFailed:
    instance = story.instance_of(model)
    number, _ = story.directive(instance.instance)
    return ReportFailed(
        node="n1", instance=instance.instance, directive=number, rung=instance.rung, step="start", code=code, message="no luck"
    )


def idle_model(sleep_ms: int | None = 2_000, cold_ms: int | None = 5_000) -> Story:
    return with_models(plane(), spec("a", idle=Idle(sleep_ms=sleep_ms, cold_ms=cold_ms)))


def test_a_report_sent_three_times_changes_nothing_more() -> None:  # C46
    story = with_models(plane(), spec("a")).given(admit("req_1"))
    up = story.up_report("a")
    story.when(up).then("InstanceUp", "RequestRouted").when(up).then_nothing().when(up).then_nothing()
    story.given(done("req_1")).when(Tick(), after_ms=300_000).then(("InstanceDirected", {"rung": Rung.SLEEP}))
    instance = up.instance
    slept = story.slept_report(instance, bytes_used=100)
    story.when(slept).then("InstanceSlept", "GrantReturned", "SkeletonMeasured")
    story.when(slept).then_nothing().when(slept).then_nothing()
    story.when(up).then_refused(Code.STALE)
    story.when(Tick(), after_ms=1_800_000).then(("InstanceDirected", {"rung": Rung.COLD}))
    number, _ = story.directive(instance)
    ended = ReportEnded(node="n1", instance=instance, directive=number, took_ms=1)
    story.when(ended).then("InstanceEnded").when(ended).then_nothing().when(ended).then_nothing()
    story.when(slept).then_refused(Code.STALE)


def test_a_failure_reported_three_times_counts_once() -> None:  # C46
    story = with_models(plane(), spec("a")).given(admit("req_1"))
    report = failure(story)
    story.when(report).when(report).then_nothing().when(report).then_nothing()
    assert [e.failures for e in story.find(ModelSetBack)] == [1]


def test_weights_reported_three_times_are_staged_and_dropped_once() -> None:  # C46
    story = with_models(plane(), spec("a"))
    staged = ReportStaged(node="n1", model="a", revision=1, weight_set="ws_a", size_bytes=5, took_ms=1)
    story.when(staged).then("WeightsStaged").when(staged).then_nothing()
    dropped = ReportDropped(node="n1", weight_set="ws_a", code="corrupt")
    story.when(dropped).then("WeightsDropped").when(dropped).then_nothing()
    story.when(staged).then("WeightsStaged")


def test_a_report_for_another_grant_or_from_another_node_is_stale() -> None:
    story = with_models(plane(), spec("a")).given(Load(model="a"))
    up = story.up_report("a")
    story.when(replace(up, grant=up.grant + 1)).then_refused(Code.STALE)
    story.when(replace(up, node="n2")).then_refused(Code.STALE)
    story.when(replace(up, instance="ins_x")).then_refused(Code.STALE)


def test_a_restarted_frontend_is_recorded_with_its_new_endpoint() -> None:
    story = with_models(plane(), spec("a")).bring_up("a").given(admit("req_1"))
    story.when(replace(story.up_report("a"), endpoint="http://there")).then("InstanceUp")
    instance = story.instance_of("a")
    assert (instance.endpoint, instance.running) == ("http://there", 1)
    story.when(admit("req_2")).then("RequestAccepted", ("RequestRouted", {"endpoint": "http://there"}))


def test_idle_instances_sleep_and_then_go_cold() -> None:
    story = idle_model().bring_up("a")
    story.when(Tick(), after_ms=1_999).then_nothing()
    story.when(Tick(), after_ms=1).then(("InstanceDirected", {"rung": Rung.SLEEP, "code": "idle"}))
    story.report_slept(story.instance_of("a").instance)
    story.when(Tick(), after_ms=4_999).then_nothing()
    story.when(Tick(), after_ms=1).then(("InstanceDirected", {"rung": Rung.COLD, "code": "idle"}))


def test_an_instance_without_limits_stays() -> None:
    story = idle_model(sleep_ms=None).bring_up("a")
    story.when(Tick(), after_ms=10**9).then_nothing()


def test_a_running_request_keeps_its_instance_up_and_its_end_starts_the_clock() -> None:
    story = idle_model().bring_up("a").given(admit("req_1"))
    story.when(Tick(), after_ms=10_000).then_nothing()
    story.given(done("req_1"))
    story.when(Tick(), after_ms=1_999).then_nothing()
    story.when(Tick(), after_ms=1).then("InstanceDirected")


def test_a_request_that_meets_the_idle_timer_is_served() -> None:  # C02
    for offset in (-50, -1, 0, 1, 50, 200, 900):
        story = idle_model().bring_up("a")
        instance = story.instance_of("a").instance
        before = offset < 0
        if before:
            story.when(admit("req_1"), after_ms=2_000 + offset).then("RequestAccepted", "RequestRouted")
            story.when(Tick(), after_ms=-offset).then_nothing()
            continue
        story.when(Tick(), after_ms=2_000).then(("InstanceDirected", {"rung": Rung.SLEEP}))
        story.when(admit("req_1"), after_ms=offset).then("RequestAccepted", ("RequestQueued", {"code": "descending"}))
        story.report_slept(instance, after_ms=1_000 - offset)
        story.then("InstanceSlept", "GrantReturned", "GrantGiven", "InstanceDirected", ("RequestQueued", {"code": "climbing"}))
        story.report_up("a").then("InstanceUp", "RequestRouted")
        assert len(story.fleet.grants) == 1


def test_a_transition_that_outlasts_every_deadline_is_called_overdue_once() -> None:  # C02
    story = with_models(plane(), spec("a")).given(Load(model="a"))
    story.when(Tick(), after_ms=599_999).then_nothing()
    story.when(Tick(), after_ms=2).then("OperationFailed", ("InstanceOverdue", {"waited_ms": 600_001}))
    story.when(Tick(), after_ms=600_001).then_nothing()


def test_a_late_sleep_never_meets_a_new_climb() -> None:  # C07
    """While the instance descends nothing turns it round; its own report does, and frees just one grant."""
    story = idle_model().bring_up("a")
    instance = story.instance_of("a").instance
    story.when(Tick(), after_ms=2_000)
    slept = story.slept_report(instance)
    story.when(admit("req_1")).when(Load(model="a")).when(Tick(), after_ms=10)
    assert [e.rung for e in story.find(InstanceDirected)] == [Rung.UP, Rung.SLEEP]
    story.when(slept)
    story.when(slept).then_refused(Code.STALE)
    assert len(story.fleet.grants) == 1
    story.report_up("a").then("InstanceUp", "OperationSucceeded", "RequestRouted")


def test_a_failed_start_backs_off_and_a_later_success_clears_it() -> None:  # C40
    story = with_models(plane(), spec("a")).given(admit("req_1"))
    story.when(failure(story)).then(
        ("InstanceFailed", {"code": "start_failed", "rung": Rung.COLD}), "GrantReturned",
        ("ModelSetBack", {"failures": 1, "retry_at_ms": story.now + 1_000}), ("RequestQueued", {"code": "backing_off"}),
    )  # fmt: skip
    story.when(admit("req_2"), after_ms=400).then_refused(Code.BACKING_OFF)
    assert story.refused is not None
    assert story.refused.retry_after_ms == 600
    story.when(Tick(), after_ms=599).then_nothing()
    story.when(Tick(), after_ms=1)
    story.then("InstanceCreated", "GrantGiven", "InstanceDirected", ("RequestQueued", {"code": "climbing"}))
    story.report_up("a").then("InstanceUp", "ModelCleared", "RequestRouted")
    story.when(admit("req_3")).then("RequestAccepted", "RequestRouted")


def test_a_request_fails_with_the_second_failed_climb_it_has_seen() -> None:
    story = with_models(plane(), spec("a")).given(admit("req_1")).given(Load(model="a"))
    story.when(failure(story))
    story.then(
        "InstanceFailed", "GrantReturned", "ModelSetBack", ("OperationFailed", {"code": "start_failed"}), "RequestQueued"
    )
    story.when(Tick(), after_ms=1_000).when(failure(story))
    story.then("InstanceFailed", "GrantReturned", ("ModelSetBack", {"failures": 2}), ("RequestFailed", {"code": "load_failed"}))
    assert not story.fleet.requests


def test_the_back_off_doubles_up_to_a_minute_and_retry_ends_it() -> None:  # C40
    story = with_models(plane(), spec("a"))
    for _ in range(8):
        story.when(Load(model="a")).when(failure(story))
        wait = story.find(ModelSetBack)[-1].retry_at_ms - story.now
        story.when(Load(model="a")).then_refused(Code.BACKING_OFF)
        story.now += wait
    waits = [e.retry_at_ms for e in story.find(ModelSetBack)]
    assert waits[-1] - waits[-2] == 60_000
    assert waits[1] - waits[0] == 2_000
    story.when(Load(model="a")).when(failure(story)).when(Retry(model="a"))
    story.then("OperationRequested", "ModelCleared", ("OperationSucceeded", {"kind": "retry"}))
    story.when(Load(model="a")).then("OperationRequested", "InstanceCreated", "GrantGiven", "InstanceDirected")


def test_retry_starts_at_once_what_waits() -> None:
    story = with_models(plane(), spec("a")).given(admit("req_1"))
    story.when(failure(story)).when(Retry(model="a"))
    story.then(
        "OperationRequested", "ModelCleared", "OperationSucceeded", "InstanceCreated", "GrantGiven", "InstanceDirected",
        ("RequestQueued", {"code": "climbing"}),
    )  # fmt: skip


def test_the_death_of_what_was_up_sets_nothing_back() -> None:
    story = with_models(plane(), spec("a")).bring_up("a")
    story.when(failure(story, code="engine_died")).then(("InstanceFailed", {"rung": Rung.UP}), "GrantReturned")
    story.when(admit("req_1")).then("RequestAccepted", "InstanceCreated", "GrantGiven", "InstanceDirected", "RequestQueued")


def test_a_sleep_that_the_engine_did_not_survive_has_failed() -> None:
    story = with_models(plane(), spec("a")).bring_up("a").given(Sleep(model="a"))
    story.when(failure(story, code="engine_died")).then(
        ("InstanceFailed", {"rung": Rung.UP}), "GrantReturned",
        ("OperationFailed", {"kind": "sleep", "code": "engine_died"}),
    )  # fmt: skip


def test_a_stop_has_what_it_wanted_however_the_engine_went() -> None:
    story = with_models(plane(), spec("a")).bring_up("a").given(Stop(model="a"))
    story.when(failure(story, code="engine_died")).then(
        "InstanceFailed", "GrantReturned", ("OperationSucceeded", {"kind": "stop"})
    )


def test_a_skeleton_is_measured_anew_only_when_it_differs() -> None:
    story = with_models(plane(), spec("a", size=600, idle=Idle(sleep_ms=2_000)))
    for size, measured in ((100, 1), (104, 0), (110, 1)):
        story.bring_up("a").when(Tick(), after_ms=2_000).report_slept(story.instance_of("a").instance, bytes_used=size)
        assert [e.type for e in story.events].count("SkeletonMeasured") == measured


def test_what_had_no_room_to_wake_is_asleep_again_and_tried_after_a_pause() -> None:
    story = with_models(plane(), spec("a", size=700)).bring_up("a")
    name = story.instance_of("a").instance
    story.given(Sleep(model="a")).report_slept(name, bytes_used=50)
    story.given(admit("req_1"))
    refused = replace(story.slept_report(name, bytes_used=50), code="device_full", message="no room")
    story.when(refused).then(
        ("InstanceDirected", {"rung": Rung.SLEEP, "code": "device_full"}), "InstanceSlept", "GrantReturned",
        ("ModelSetBack", {"failures": 1, "code": "device_full"}), ("RequestQueued", {"code": "backing_off"}),
    )  # fmt: skip
    instance = story.instance_of("a")
    assert (instance.rung, instance.directive_settled, instance.leased_to) == (Rung.SLEEP, True, frozenset())
    story.when(refused).then_refused(Code.STALE)
    story.when(Tick(), after_ms=1_000).then(
        "GrantGiven", ("InstanceDirected", {"rung": Rung.UP, "instance": name}), "RequestQueued"
    )
