"""Requests: in, routed, lost, cancelled, ended."""

import pytest

from controlplane.answer import Queued, Routed, answer
from controlplane.commands import (
    Admit,
    CancelRequest,
    CloseGateway,
    End,
    EndRequests,
    Interrupt,
    NodeSilent,
    OpenGateway,
    RegisterModel,
    ReportFailed,
    ReportUnusable,
    RetireModel,
    Tick,
)
from controlplane.decisions import admission
from controlplane.decisions.admission import known
from controlplane.events import ModelSetBack, RequestCancelled, RequestFailed, RequestRouted
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from controlplane.spec import ModelSpec
from tests.unit.decisions.spec import DEVICE, Story, inspected, plane, spec, with_models


def admit(request: str, model: str, **more: object) -> Admit:
    fields: dict[str, object] = {"gateway": "gw_1", "kind": "chat", "streamed": True, "prompt_bytes": 9, **more}
    return Admit(request=request, model=model, **fields)  # type: ignore[arg-type]


def done(request: str) -> EndRequests:
    return EndRequests(ends=(End(request=request, outcome="finished", finish_reason="stop", completion_tokens=3),))


def serving(*names: str) -> Story:
    """Models of half a device each, up."""
    story = with_models(plane(), *(spec(n, size=DEVICE // 2) for n in names))
    for name in names:
        story.bring_up(name)
    return story


def interrupt(request: str, *, attempt: int = 1, sent: int = 0) -> Interrupt:
    return Interrupt(request=request, attempt=attempt, sent_chars=sent, code="engine_died", message="gone")


def test_a_model_that_is_up_takes_a_request_at_once() -> None:
    story = serving("a").when(admit("req_1", "a")).then("RequestAccepted", ("RequestRouted", {"attempt": 1}))
    assert isinstance(answer(story.events), Routed)
    story.when(done("req_1"), after_ms=70).then(("RequestFinished", {"took_ms": 70, "queued_ms": 0, "completion_tokens": 3}))
    assert not story.fleet.requests
    assert not story.fleet.waiting


def test_an_alias_means_its_model() -> None:
    story = with_models(plane(), spec("llama", aliases=("l",))).bring_up("llama")
    story.when(admit("req_1", "l")).then(("RequestAccepted", {"model": "llama"}), "RequestRouted")


def test_an_unknown_model_is_refused_with_a_near_match() -> None:
    serving("llama").when(admit("req_1", "lama")).then_refused(Code.MODEL_UNKNOWN, did_you_mean="llama")
    serving("llama").when(admit("req_1", "zzz")).then_refused(Code.MODEL_UNKNOWN, did_you_mean=None)


def test_who_asks_for_a_model_that_is_not_there_is_told_which_are() -> None:
    with pytest.raises(Refused, match="no model is called 'zzz'; there is none yet"):
        known(plane().fleet, "zzz")
    with pytest.raises(Refused, match=r"no model is called 'zzz'; known: llama$"):
        known(serving("llama").fleet, "zzz")
    many = with_models(plane(), *(spec(f"m{number}") for number in range(10))).fleet
    with pytest.raises(Refused, match=r"no model is called 'zzz'; known: m0, m1, m2, m3, m4, m5, m6, m7 and 2 more$"):
        known(many, "zzz")
    with pytest.raises(Refused, match=f"no model is called '{'z' * 100}'; "):
        known(many, "z" * 5000)


def test_a_request_id_is_taken_while_it_is_open() -> None:
    serving("a").given(admit("req_1", "a")).when(admit("req_1", "a")).then_refused(Code.REQUEST_EXISTS)


def test_a_gateway_that_is_not_open_admits_nothing() -> None:
    serving("a").when(admit("req_1", "a", gateway="gw_9")).then_refused(Code.GATEWAY_UNKNOWN)


def test_a_caller_who_will_not_wait_is_refused_rather_than_queued() -> None:  # SL1
    story = with_models(plane(), spec("a"), spec("b")).bring_up("a").given(admit("req_1", "a"))
    story.when(admit("req_2", "b", wait=False)).then_refused(Code.BUSY)
    story.when(admit("req_3", "a", wait=False)).then("RequestAccepted", "RequestRouted")


def test_a_long_wait_elsewhere_does_not_make_an_unrelated_warm_model_busy() -> None:
    half = DEVICE // 2
    story = with_models(plane(), spec("a", size=half), spec("b", size=half), spec("c", size=half))
    story.bring_up("a").bring_up("b").given(admit("req_a", "a"), after_ms=1)
    story.given(admit("req_b1", "b")).given(admit("req_b2", "b"))
    story.when(admit("req_c", "c")).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    story.when(admit("req_x", "b", wait=False), after_ms=31_000).then("RequestAccepted", "RequestRouted")
    story.when(admit("req_y", "a", wait=False)).then_refused(Code.BUSY)


def test_the_queue_of_one_model_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "QUEUE_LIMIT", 3)
    story = with_models(plane(), spec("a"))
    for n in range(3):
        story.when(admit(f"req_{n}", "a"))
    story.then("RequestAccepted", ("RequestQueued", {"code": "climbing", "place": 3}))
    story.when(admit("req_x", "a")).then_refused(Code.QUEUE_FULL, limit=3)


def test_a_model_under_inspection_is_waited_for_but_not_for_ever() -> None:
    story = plane().given(RegisterModel(spec=spec("a")))
    story.when(admit("req_1", "a"), after_ms=59_000).then("RequestAccepted", ("RequestQueued", {"code": "inspecting"}))
    story.when(admit("req_2", "a"), after_ms=1_000).then_refused(Code.MODEL_UNREADY)
    story.when(inspected(spec("a"))).then(
        "ModelInspected", "ConfigurationFound", "InstanceCreated", "GrantGiven", "InstanceDirected",
        ("RequestQueued", {"code": "climbing"}),
    )  # fmt: skip


def test_an_unusable_source_ends_what_waits_and_refuses_what_comes() -> None:
    story = plane().given(RegisterModel(spec=spec("a"))).given(admit("req_1", "a"))
    report = ReportUnusable(node="n1", model="a", revision=1, code="model_unusable", message="no config.json")
    story.when(report).then("ModelRejected", ("RequestFailed", {"code": "model_unusable", "message": "no config.json"}))
    story.when(report).then_nothing()
    story.when(admit("req_2", "a")).then_refused(Code.MODEL_UNUSABLE)


def test_a_source_that_can_not_be_opened_is_told_as_that_with_its_path_and_what_to_do() -> None:
    story = plane().given(RegisterModel(spec=ModelSpec(name="a", source="/models/a"))).given(admit("req_1", "a"))
    said = "/models/a: No such file or directory"
    story.when(ReportUnusable(node="n1", model="a", revision=1, code="bad_source", message=said, final=False))
    why = (
        "the source of a can't be opened (/models/a): No such file or directory; "
        "make sure that the model is there and that its node can read it, or give another source"
    )
    story.then(("ModelSetBack", {"message": why}), ("RequestQueued", {"reason": f"{why}; the next is tried after a pause"}))
    story.when(admit("req_2", "a")).then_refused(Code.BACKING_OFF)
    assert story.refused is not None
    assert story.refused.message == f"{why}; next try in 1.0 s, or at once with `retry`"


def test_a_draft_model_that_can_not_be_opened_is_named_as_that() -> None:
    story = plane().given(RegisterModel(spec=ModelSpec(name="a", source="/models/a", arguments={"draft_model": "/models/d"})))
    said = "draft_model: /models/d: Permission denied"
    story.when(ReportUnusable(node="n1", model="a", revision=1, code="bad_source", message=said, final=False))
    (back,) = story.find(ModelSetBack)
    assert back.message.startswith("the draft_model of a can't be opened (/models/d): Permission denied; make sure")


def test_a_retired_model_is_refused_and_its_waiting_requests_end() -> None:
    story = with_models(plane(), spec("a"), spec("b")).bring_up("a").given(admit("req_1", "a")).given(admit("req_2", "b"))
    story.when(RetireModel(model="b")).then("ModelRetired", ("RequestFailed", {"request": "req_2", "code": "model_retired"}))
    story.when(admit("req_3", "b")).then_refused(Code.MODEL_RETIRED)
    story.when(RetireModel(model="a")).then("ModelRetired")
    story.when(done("req_1")).then("RequestFinished")
    story.when(Tick()).then(("InstanceDirected", {"rung": Rung.COLD, "code": "retired"}))


def test_requests_go_where_the_queue_is_shortest_and_never_to_a_silent_node() -> None:
    story = serving("a").given(NodeSilent(node="n1"))
    story.when(admit("req_1", "a")).then("RequestAccepted", ("RequestQueued", {"code": "node_silent"}))
    story.when(Tick(), after_ms=120_000).then(("RequestFailed", {"code": "queue_timeout"}))


def test_one_of_several_callers_of_a_load_leaves_and_the_others_are_served() -> None:  # C11
    story = with_models(plane(), spec("a"))
    for n in range(10):
        story.when(admit(f"req_{n}", "a"))
    assert len([r for r in story.log if r.type == "InstanceDirected"]) == 1
    story.when(EndRequests(ends=(End(request="req_0", outcome="cancelled"),)))
    story.then(("RequestCancelled", {"by": "caller", "phase": "climbing"}))
    story.report_up("a").then("InstanceUp", *["RequestRouted"] * 9)
    assert "req_0" not in {e.request for e in story.find(RequestRouted)}


def test_a_queued_a_climbing_and_a_running_request_can_be_cancelled() -> None:  # N27
    story = with_models(plane(), spec("a"), spec("b")).given(admit("req_a", "a")).given(admit("req_b", "b"))
    story.when(CancelRequest(request="req_b")).then(("RequestCancelled", {"phase": "queued", "by": "operator"}))
    story.when(CancelRequest(request="req_a")).then(("RequestCancelled", {"phase": "climbing"}))
    story.report_up("a").given(admit("req_c", "a"))
    story.when(CancelRequest(request="req_c")).then(("RequestCancelled", {"phase": "running"}))
    instance = story.instance_of("a")
    assert (instance.running, instance.leased_to) == (0, frozenset())
    assert not story.fleet.requests
    assert not story.fleet.waiting
    story.when(CancelRequest(request="req_c")).then_refused(Code.REQUEST_UNKNOWN)
    story.when(admit("req_d", "b")).then("RequestAccepted", ("InstanceDirected", {"code": "evicted"}), "RequestQueued")


def test_an_untouched_request_is_tried_once_more_and_one_that_has_begun_is_not() -> None:
    story = serving("a").given(admit("req_1", "a")).given(admit("req_2", "a"))
    story.when(interrupt("req_2", sent=5)).then(("RequestFailed", {"code": "engine_died"}))
    story.when(interrupt("req_1")).then("RequestInterrupted", ("RequestQueued", {"code": "reopened"}))
    assert isinstance(answer(story.events), Queued)
    story.when(interrupt("req_1")).then_nothing()
    instance, (number, _) = story.instance_of("a"), story.directive(story.instance_of("a").instance)
    died = ReportFailed(
        node="n1", instance=instance.instance, directive=number, rung=Rung.UP, step="serve", code="engine_died", message="gone"
    )
    story.when(died)
    story.then(
        "InstanceFailed", "GrantReturned", "InstanceCreated", "GrantGiven", "InstanceDirected",
        ("RequestQueued", {"code": "climbing"}),
    )  # fmt: skip
    story.report_up("a").then("InstanceUp", ("RequestRouted", {"attempt": 2}))
    story.when(interrupt("req_1", attempt=1)).then_nothing()
    story.when(interrupt("req_1", attempt=2)).then("RequestFailed")


def test_an_interrupted_request_returns_to_the_same_instance_only_after_a_while() -> None:
    story = serving("a").given(admit("req_1", "a")).given(interrupt("req_1"))
    story.when(admit("req_2", "a")).then("RequestAccepted", "RequestRouted")
    story.when(Tick(), after_ms=1_000).then_nothing()
    story.when(Tick(), after_ms=1_000).then(("RequestRouted", {"request": "req_1", "attempt": 2}))


def test_a_request_whose_instance_is_gone_ends_even_if_its_gateway_says_nothing() -> None:
    story = serving("a").given(admit("req_1", "a"))
    instance = story.instance_of("a")
    number, _ = story.directive(instance.instance)
    story.given(
        ReportFailed(node="n1", instance=instance.instance, directive=number, rung=Rung.UP, step="s", code="c", message="m")
    )
    story.when(Tick(), after_ms=9_000).then_nothing()
    story.when(Tick(), after_ms=1_000).then(("RequestFailed", {"code": "instance_lost"}))


def test_time_in_which_nobody_could_be_heard_is_not_held_against_a_gateway() -> None:
    story = serving("a").given(admit("req_1", "a"))
    instance = story.instance_of("a")
    number, _ = story.directive(instance.instance)
    story.given(
        ReportFailed(node="n1", instance=instance.instance, directive=number, rung=Rung.UP, step="s", code="c", message="m")
    )
    back = story.now + 3_600_000
    story.when(Tick(since_ms=back), after_ms=3_600_000).then_nothing()
    story.when(Tick(since_ms=back), after_ms=9_999).then_nothing()
    story.when(Tick(since_ms=back), after_ms=1).then(("RequestFailed", {"code": "instance_lost"}))


def test_a_gateway_takes_its_requests_with_it() -> None:
    story = serving("a").given(admit("req_1", "a")).given(OpenGateway(gateway="gw_2", host="elsewhere", pid=2))
    story.given(admit("req_2", "a", gateway="gw_2"))
    story.when(CloseGateway(gateway="gw_2", code="silent")).then(
        ("RequestCancelled", {"request": "req_2", "by": "gateway", "phase": "running"}), ("GatewayClosed", {"code": "silent"})
    )
    assert story.instance_of("a").running == 1
    story.when(OpenGateway(gateway="gw_3", host="here", pid=3)).then(
        ("RequestCancelled", {"request": "req_1"}), ("GatewayClosed", {"gateway": "gw_1", "code": "replaced"}), "GatewayOpened"
    )
    assert len(story.find(RequestCancelled)) == 2
    assert not story.find(RequestFailed)
