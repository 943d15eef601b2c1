"""Load, sleep, stop: what an operator asks for, and what others ask for meanwhile."""

from controlplane.answer import Opened, answer
from controlplane.commands import Admit, End, EndRequests, Load, ReportEnded, Retry, Sleep, Stop
from controlplane.refusal import Code
from controlplane.rungs import Rung
from tests.unit.decisions.spec import Story, plane, spec, with_models

CLIMB = ("InstanceCreated", "GrantGiven", ("InstanceDirected", {"rung": Rung.UP}))


def admit(request: str, model: str = "a") -> Admit:
    return Admit(request=request, model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9)


def done(request: str) -> EndRequests:
    return EndRequests(ends=(End(request=request, outcome="finished"),))


def ended(story: Story, instance: str) -> ReportEnded:
    return ReportEnded(node="n1", instance=instance, directive=story.directive(instance)[0], took_ms=1)


def one(*names: str) -> Story:
    return with_models(plane(), *(spec(name) for name in names or ("a",)))


def test_a_load_is_done_when_the_model_is_up() -> None:
    story = one().when(Load(model="a"))
    story.then(("OperationRequested", {"kind": "load"}), *CLIMB)
    opened = answer(story.events)
    assert isinstance(opened, Opened)
    assert {r.operation for r in story.events} == {opened.operation}
    story.report_up("a", after_ms=40)
    story.then("InstanceUp", ("OperationSucceeded", {"operation": opened.operation, "took_ms": 40}))
    story.when(Load(model="a")).then("OperationRequested", ("OperationSucceeded", {"note": "was up already"}))


def test_two_loads_that_cannot_both_fit_both_get_an_answer() -> None:
    story = one("a", "b").when(Load(model="a")).when(Load(model="b"))
    story.then("OperationRequested")
    story.report_up("a").then("InstanceUp", ("OperationSucceeded", {"model": "a"}), ("InstanceDirected", {"code": "evicted"}))
    story.report_slept(story.instance_of("a").instance).then("InstanceSlept", "GrantReturned", *CLIMB)
    story.report_up("b").then("InstanceUp", ("OperationSucceeded", {"model": "b"}))


def test_sleep_keeps_the_skeleton_and_stop_ends_it() -> None:
    story = one().bring_up("a")
    instance = story.instance_of("a").instance
    story.when(Sleep(model="a")).then("OperationRequested", ("InstanceDirected", {"rung": Rung.SLEEP, "code": "operator"}))
    story.report_slept(instance).then("InstanceSlept", "GrantReturned", ("OperationSucceeded", {"kind": "sleep"}))
    story.when(Sleep(model="a")).then("OperationRequested", ("OperationSucceeded", {"note": "was not up"}))
    story.when(Stop(model="a")).then("OperationRequested", ("InstanceDirected", {"rung": Rung.COLD}))
    story.when(ended(story, instance)).then("InstanceEnded", ("OperationSucceeded", {"kind": "stop"}))
    story.when(Stop(model="a")).then("OperationRequested", ("OperationSucceeded", {"note": "no process was there"}))


def test_a_user_whose_model_another_unloads_is_served_by_another_climb() -> None:  # C49
    story = one().bring_up("a")
    instance = story.instance_of("a").instance
    story.when(Sleep(model="a")).when(admit("req_1")).then("RequestAccepted", ("RequestQueued", {"code": "descending"}))
    story.report_slept(instance).then(
        "InstanceSlept", "GrantReturned", "GrantGiven", ("InstanceDirected", {"rung": Rung.UP}), "RequestQueued",
        "OperationSucceeded",
    )  # fmt: skip
    story.report_up("a").then("InstanceUp", "RequestRouted")


def test_load_and_stop_at_the_same_instant_both_end() -> None:  # C49
    story = one().when(Load(model="a")).when(Stop(model="a"))
    story.then("OperationRequested", ("OperationFailed", {"code": "superseded"}), ("InstanceDirected", {"rung": Rung.COLD}))
    instance = next(iter(story.fleet.instances))
    assert not story.fleet.instances[instance].directive_settled
    story.when(Load(model="a")).then("OperationRequested")
    story.when(ended(story, instance))
    story.then("InstanceEnded", "GrantReturned", *CLIMB, ("OperationSucceeded", {"kind": "stop"}))
    story.report_up("a").then("InstanceUp", ("OperationSucceeded", {"kind": "load"}))


def test_sleep_during_a_climb_waits_for_it_and_then_drains() -> None:  # C49
    story = one().when(admit("req_1")).when(Sleep(model="a")).then("OperationRequested")
    story.report_up("a").then("InstanceUp", "RequestRouted", ("InstanceDirected", {"rung": Rung.SLEEP}))
    story.when(done("req_1")).then("RequestFinished")
    story.report_slept(story.instance_of("a").instance).then("InstanceSlept", "GrantReturned", "OperationSucceeded")


def test_requests_that_a_drain_could_not_wait_for_are_ended_by_their_gateway() -> None:
    story = one().bring_up("a").given(admit("req_1"))
    instance = story.instance_of("a").instance
    story.when(Stop(model="a")).when(ended(story, instance)).then("InstanceEnded", "GrantReturned", "OperationSucceeded")
    assert story.fleet.requests["req_1"].lost_ms == story.now
    story.when(EndRequests(ends=(End(request="req_1", outcome="failed", code="aborted"),))).then("RequestFailed")


def test_a_stop_overtakes_a_sleep() -> None:
    story = one().bring_up("a").when(Sleep(model="a")).when(Stop(model="a"))
    story.then("OperationRequested", ("InstanceDirected", {"rung": Rung.COLD}))
    story.when(ended(story, story.instance_of("a").instance))
    story.then(
        "InstanceEnded", "GrantReturned", ("OperationSucceeded", {"kind": "sleep"}), ("OperationSucceeded", {"kind": "stop"})
    )


def test_operations_on_what_is_not_there_are_refused() -> None:
    for command in (Load(model="x"), Sleep(model="x"), Stop(model="x"), Retry(model="x")):
        one().when(command).then_refused(Code.MODEL_UNKNOWN)
    one().when(Retry(model="a")).then("OperationRequested", ("OperationSucceeded", {"note": "nothing had failed"}))
