"""Who gets which place, when, and who leaves for it."""

from controlplane.commands import (
    Admit,
    End,
    EndRequests,
    Interrupt,
    Load,
    RegisterModel,
    ReportEnded,
    ReportFailed,
    Sleep,
    Tick,
)
from controlplane.decisions.limits import BOUND_MS, RENEWED_MS
from controlplane.events import GrantGiven, InstanceCreated, InstanceDirected, RequestQueued, RequestRouted
from controlplane.refusal import Code
from controlplane.rungs import Rung
from tests.unit.decisions.spec import DEVICE, Story, plane, spec, with_models

CLIMB = ("InstanceCreated", "GrantGiven", ("InstanceDirected", {"rung": Rung.UP}))


def admit(request: str, model: str) -> Admit:
    return Admit(request=request, model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9)


def done(*requests: str) -> EndRequests:
    return EndRequests(ends=tuple(End(request=request, outcome="finished") for request in requests))


def one_place(*names: str) -> Story:
    """One device; each model takes the whole of it; the first is up."""
    return with_models(plane(), *(spec(name) for name in names)).bring_up(names[0])


def evict(story: Story, model: str) -> Story:
    """The worker puts the model's instance to sleep, and then to its end if it is told to."""
    return story.report_slept(story.instance_of(model).instance)


def test_a_cold_model_climbs_for_its_first_request_and_the_others_join() -> None:
    story = with_models(plane(), spec("a"))
    story.when(admit("req_1", "a"))
    story.then("RequestAccepted", *CLIMB, ("RequestQueued", {"code": "climbing", "place": 1}))
    directed = story.find(InstanceDirected)[0]
    assert (directed.for_request, directed.code) == ("req_1", "request")
    assert {r.operation for r in story.events} == {"op_1"}
    story.when(admit("req_2", "a")).then("RequestAccepted", ("RequestQueued", {"code": "climbing", "place": 2}))
    story.report_up("a").then("InstanceUp", ("RequestRouted", {"request": "req_1"}), ("RequestRouted", {"request": "req_2"}))
    assert story.events[0].operation == "op_1"


def test_a_start_that_nobody_waits_for_any_more_gives_way() -> None:  # C10
    story = with_models(plane(), spec("a"), spec("b")).when(admit("req_1", "a"))
    story.when(EndRequests(ends=(End(request="req_1", outcome="cancelled"),))).then("RequestCancelled")
    climber = story.instance_of("a").instance
    story.when(admit("req_2", "b")).then(
        "RequestAccepted", ("InstanceDirected", {"instance": climber, "rung": Rung.COLD, "victim_of": "b"}),
        ("RequestQueued", {"code": "descending"}),
    )  # fmt: skip
    number, _ = story.directive(climber)
    story.when(ReportEnded(node="n1", instance=climber, directive=number, took_ms=1))
    story.then("InstanceEnded", "GrantReturned", *CLIMB, ("RequestQueued", {"code": "climbing"}))


def test_a_start_is_called_back_when_its_last_caller_leaves_before_another_ones_model() -> None:  # C10, the variant
    story = with_models(plane(), spec("a"), spec("b")).when(admit("req_1", "a")).when(admit("req_2", "a"))
    story.when(admit("req_3", "b")).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    story.when(EndRequests(ends=(End(request="req_1", outcome="cancelled"),))).then("RequestCancelled")
    assert story.code_of("req_3") == "slot_busy", "another one still waits for it"
    story.when(EndRequests(ends=(End(request="req_2", outcome="cancelled"),)))
    story.then("RequestCancelled", ("InstanceDirected", {"rung": Rung.COLD, "victim_of": "b"}), "RequestQueued")


def test_a_start_that_an_operator_asked_for_goes_on() -> None:
    story = with_models(plane(), spec("a"), spec("b")).when(Load(model="a"))
    story.when(admit("req_1", "b")).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))


def test_a_busy_place_is_waited_for_and_the_reason_names_who_holds_it() -> None:  # C01 without preempting
    story = one_place("a", "b").given(admit("req_1", "a")).given(admit("req_2", "a"))
    story.when(admit("req_3", "b"))
    story.then("RequestAccepted", ("RequestQueued", {"code": "slot_busy", "reason": "slot busy: a serves requests on cpu0"}))
    story.when(done("req_1")).then("RequestFinished")
    story.when(done("req_2"))
    story.then(
        "RequestFinished", ("InstanceDirected", {"rung": Rung.SLEEP, "code": "evicted", "victim_of": "b"}),
        ("RequestQueued", {"code": "descending"}),
    )  # fmt: skip
    evict(story, "a").then("InstanceSlept", "GrantReturned", *CLIMB, ("RequestQueued", {"code": "climbing"}))
    story.report_up("b").then("InstanceUp", "RequestRouted")


def test_who_waits_for_a_busy_place_is_told_anew_when_another_thing_keeps_it_busy() -> None:
    story = with_models(plane(), spec("a"), spec("b")).given(admit("req_1", "a")).given(admit("req_2", "b"))
    assert story.fleet.requests["req_2"].reason == "slot busy: a is loading on cpu0"
    story.report_up("a").then("InstanceUp", "RequestRouted")
    story.when(Tick(), after_ms=RENEWED_MS).then(("RequestQueued", {"reason": "slot busy: a serves requests on cpu0"}))
    for number in range(3, 6):  # how many they are is another number at once, and in no sentence
        story.when(admit(f"req_{number}", "a")).then("RequestAccepted", "RequestRouted")
        story.when(Tick(), after_ms=RENEWED_MS).then_nothing()


def test_the_requests_that_paid_for_a_load_are_served_before_it_can_be_evicted() -> None:  # C04
    story = with_models(plane(), spec("a"), spec("b"))
    story.given(admit("req_1", "a")).given(admit("req_2", "b")).given(admit("req_3", "a"))
    story.when(Tick(), after_ms=300).then_nothing()
    story.report_up("a").then("InstanceUp", ("RequestRouted", {"request": "req_1"}), ("RequestRouted", {"request": "req_3"}))
    story.when(Tick(), after_ms=300).then_nothing()
    story.when(done("req_3")).then("RequestFinished")
    story.when(done("req_1")).then("RequestFinished", "InstanceDirected", "RequestQueued")
    evict(story, "a").report_up("b").then("InstanceUp", ("RequestRouted", {"request": "req_2"}))


def test_a_lease_outlasts_an_interruption_even_past_the_bound() -> None:  # C04
    story = with_models(plane(), spec("a"), spec("b")).given(admit("req_1", "a")).given(admit("req_2", "b")).report_up("a")
    story.when(lost("req_1"), after_ms=BOUND_MS + 1)
    story.then(
        "RequestInterrupted", ("RequestQueued", {"request": "req_1", "code": "reopened"}),
        ("RequestQueued", {"request": "req_2", "reason": "slot busy: a is kept for a request of its own on cpu0"}),
    )  # fmt: skip
    story.when(Tick(), after_ms=2_000).then(("RequestRouted", {"request": "req_1", "attempt": 2}))


def test_who_paid_for_a_climb_is_let_in_though_an_earlier_one_is_past_the_bound() -> None:  # C04, I8
    """Neither may wait for the other: the place is free once the one for whom it climbed has been served, not before."""
    story = with_models(plane(), spec("early"), spec("late")).given(admit("req_1", "early"))
    climber = story.instance_of("early").instance
    number, _ = story.directive(climber)
    story.given(
        ReportFailed(
            node="n1", instance=climber, directive=number, step="attach", code="step_deadline", message="slow", rung=Rung.COLD
        )
    )
    story.given(admit("req_2", "late")).given(admit("req_3", "late"))
    assert (story.code_of("req_1"), story.code_of("req_2")) == ("backing_off", "climbing")
    story.report_up("late", after_ms=BOUND_MS + 1)
    story.then(
        "InstanceUp", ("RequestRouted", {"request": "req_2"}), ("RequestQueued", {"request": "req_1", "code": "slot_busy"}),
        ("RequestQueued", {"request": "req_3", "code": "behind"}),
    )  # fmt: skip
    story.when(done("req_2"))
    story.then("RequestFinished", ("InstanceDirected", {"rung": Rung.SLEEP, "victim_of": "early"}), *["RequestQueued"] * 2)
    evict(story, "late").report_up("early")
    story.then("InstanceUp", "ModelCleared", ("RequestRouted", {"request": "req_1"}), "RequestQueued")


def test_an_interrupted_request_keeps_its_instance_until_it_is_tried_again() -> None:
    story = one_place("a", "b").given(admit("req_1", "a")).given(admit("req_2", "b"))
    story.when(lost("req_1")).then("RequestInterrupted", ("RequestQueued", {"code": "reopened"}))
    story.when(Tick(), after_ms=2_000).then(("RequestRouted", {"request": "req_1", "attempt": 2}))


def lost(request: str) -> Interrupt:
    return Interrupt(request=request, attempt=1, sent_chars=0, code="frontend_lost", message="gone")


def test_a_loading_instance_is_not_a_victim() -> None:  # C05
    story = with_models(plane(), spec("a"), spec("b")).given(admit("req_1", "a"))
    story.when(admit("req_2", "b"), after_ms=5_000)
    story.then("RequestAccepted", ("RequestQueued", {"code": "slot_busy", "reason": "slot busy: a is loading on cpu0"}))
    story.when(Tick(), after_ms=1_000).then_nothing()
    assert len(story.find(InstanceDirected)) == 1


def test_two_cold_loads_never_share_the_last_place() -> None:  # C13
    story = with_models(plane(devices=2), spec("a"), spec("c"), spec("d")).bring_up("a").given(admit("req_a", "a"))
    story.when(admit("req_c", "c")).then("RequestAccepted", *CLIMB, "RequestQueued")
    story.when(admit("req_d", "d")).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    assert [g.device for g in story.fleet.grants.values()].count("dev1") == 1


def test_what_can_never_fit_evicts_nobody() -> None:  # C14
    story = with_models(plane(devices=2), spec("a")).bring_up("a")
    grown = spec("big", size=DEVICE * 12 // 10)
    story.when(RegisterModel(spec=grown)).then_refused(Code.CANNOT_FIT, need_bytes=960, limit_bytes=800)
    story = with_models(plane(pool_bytes=700), spec("a", size=600)).bring_up("a")
    story.when(RegisterModel(spec=spec("fat"))).then_refused(Code.CANNOT_FIT, need_bytes=800, limit_bytes=700)
    assert not [e for e in story.find(InstanceDirected) if e.code == "evicted"]


def test_memory_that_is_being_freed_is_promised_so_one_load_evicts_one() -> None:
    story = with_models(plane(devices=2), spec("a"), spec("b"), spec("c")).bring_up("a").bring_up("b")
    story.when(admit("req_1", "c"), after_ms=10).then("RequestAccepted", "InstanceDirected", "RequestQueued")
    victim = story.find(InstanceDirected)[-1].instance
    for _ in range(3):
        story.when(Tick(), after_ms=10).then_nothing()
    assert story.fleet.instances[victim].model == "a", "the least recently used one"


def test_a_later_waiter_goes_ahead_only_where_it_does_not_delay_the_head() -> None:
    """A whole device is wanted while a half of each runs: the freed half of the head's device stays free for it."""
    half = DEVICE // 2
    story = with_models(plane(devices=2), *(spec(n, size=half) for n in "abcd"), spec("whole"), spec("late", size=half))
    for name in "abcd":
        story.bring_up(name).given(admit(f"req_{name}", name))
    story.when(admit("req_w", "whole")).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    story.when(admit("req_l", "late")).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    first, second = (i for i in story.fleet.instances.values() if story.fleet.grants[i.grant or 0].device == "dev0")
    story.when(done(f"req_{first.model}")).then("RequestFinished")
    other = next(i for i in story.fleet.instances.values() if story.fleet.grants[i.grant or 0].device == "dev1")
    story.when(done(f"req_{other.model}"))
    assert {e.event.victim_of for e in story.events if isinstance(e.event, InstanceDirected)} <= {"late", "whole"}
    story.when(done(f"req_{second.model}"))
    directed = [e for e in story.find(InstanceDirected) if e.code == "evicted"]
    devices = {e.victim_of: story.fleet.instances[e.instance].device for e in directed}
    assert devices["whole"] != devices["late"]


def test_a_free_place_that_the_head_needs_is_not_taken_by_a_later_one() -> None:
    story = with_models(plane(), spec("half", size=DEVICE // 2), spec("whole"), spec("late", size=DEVICE // 2))
    story.bring_up("half").given(admit("req_h", "half"))
    story.when(admit("req_w", "whole")).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    story.when(admit("req_l", "late")).then("RequestAccepted", ("RequestQueued", {"code": "behind"}))


def test_the_fewest_leave_even_if_they_were_used_last() -> None:
    quarter, half = DEVICE // 4, DEVICE // 2
    models = spec("q1", size=quarter), spec("q2", size=quarter), spec("h", size=half), spec("new", size=half)
    story = with_models(plane(), *models)
    for name in ("q1", "q2", "h"):
        story.now += 10
        story.bring_up(name)
    story.when(admit("req_1", "new")).then("RequestAccepted", ("InstanceDirected", {"code": "evicted"}), "RequestQueued")
    assert story.fleet.instances[story.find(InstanceDirected)[-1].instance].model == "h"


def test_warm_models_are_used_past_the_head_until_its_bound() -> None:
    story = one_place("a", "b").given(admit("req_1", "a")).given(admit("req_2", "b"))
    story.when(admit("req_3", "a"), after_ms=BOUND_MS).then("RequestAccepted", "RequestRouted")
    story.when(admit("req_4", "a"), after_ms=1)
    story.then("RequestAccepted", ("RequestQueued", {"code": "behind", "place": 2}))
    story.when(done("req_1", "req_3"))
    story.then("RequestFinished", "RequestFinished", ("InstanceDirected", {"victim_of": "b"}), "RequestQueued", "RequestQueued")
    evict(story, "a").report_up("b").then("InstanceUp", ("RequestRouted", {"request": "req_2"}), "RequestQueued")
    story.when(done("req_2")).then("RequestFinished", ("InstanceDirected", {"victim_of": "a"}), "RequestQueued")


def test_two_models_that_evict_each_other_take_turns() -> None:  # PL21
    story = one_place("a", "b")
    for n in range(4):
        story.when(admit(f"req_b{n}", "b")).when(admit(f"req_a{n}", "a"))
        evict(story, "a").report_up("b").then("InstanceUp", ("RequestRouted", {"request": f"req_b{n}"}), "RequestQueued")
        story.when(done(f"req_b{n}"))
        evict(story, "b").report_up("a").then("InstanceUp", ("RequestRouted", {"request": f"req_a{n}"}))
        story.when(done(f"req_a{n}")).then("RequestFinished")
    assert not story.fleet.waiting
    assert len(story.find(InstanceCreated)) == 2


def test_one_skeleton_serves_the_models_of_its_configuration() -> None:
    story = with_models(plane(), spec("base", source="s"), spec("tuned", source="s")).bring_up("base")
    grant = story.instance_of("base").grant
    story.when(admit("req_1", "tuned"))
    story.then("RequestAccepted", ("InstanceDirected", {"rung": Rung.UP, "model": "tuned", "grant": grant}), "RequestQueued")
    story.report_up("tuned").then("InstanceUp", "RequestRouted")
    assert len(story.fleet.instances) == 1
    story.when(admit("req_2", "base")).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    story.when(done("req_1")).then("RequestFinished", ("InstanceDirected", {"model": "base", "grant": grant}), "RequestQueued")


def test_a_sleeping_skeleton_is_woken_rather_than_a_new_one_started() -> None:
    story = with_models(plane(devices=2), spec("base", source="s"), spec("tuned", source="s")).bring_up("base")
    instance = story.instance_of("base").instance
    story.when(Sleep(model="base")).report_slept(instance)
    story.when(admit("req_1", "tuned")).then("RequestAccepted", "GrantGiven", "InstanceDirected", "RequestQueued")
    assert story.find(GrantGiven)[-1].instance == instance


def test_the_first_come_is_first_served_across_models() -> None:
    story = one_place("a", "b", "c").given(admit("req_a", "a"))
    story.when(admit("req_b", "b")).when(admit("req_c", "c")).when(admit("req_b2", "b"))
    assert [e.place for e in story.find(RequestQueued)] == [1, 2, 3]
    story.when(done("req_a"))
    evict(story, "a").report_up("b").when(done("req_b", "req_b2"))
    evict(story, "b").report_up("c")
    assert [e.request for e in story.find(RequestRouted)] == ["req_a", "req_b", "req_b2", "req_c"]
