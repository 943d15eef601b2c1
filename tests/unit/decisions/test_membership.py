"""Nodes, devices, gateways and deciders come and go."""

from controlplane.commands import (
    Admit,
    BeginReign,
    Farewell,
    InstanceFound,
    Load,
    NodeHeard,
    NodeSilent,
    ReportStaged,
    Sleep,
    Tick,
)
from controlplane.events import InstanceDirected
from controlplane.refusal import Code
from controlplane.rungs import Rung
from tests.unit.decisions.spec import Story, hello, plane, spec, with_models


def admit(request: str, model: str = "a") -> Admit:
    return Admit(request=request, model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9)


def found(story: Story, model: str = "a") -> InstanceFound:
    i = story.instance_of(model)
    return InstanceFound(instance=i.instance, rung=i.rung, model=i.model, grant=i.grant)


def test_the_same_hello_again_changes_nothing() -> None:
    story = plane(devices=2).when(hello(devices=2)).then_nothing()
    story.when(hello(devices=2, incarnation="inc_2")).then(("NodeJoined", {"incarnation": "inc_2"}))
    story.when(hello(devices=1, incarnation="inc_2")).then(("DeviceWithdrawn", {"device": "dev1"}))
    story.when(hello(devices=2, incarnation="inc_2")).then(("DeviceDeclared", {"device": "dev1"}))


def test_what_a_restarted_worker_adopts_stays_and_what_it_misses_is_lost() -> None:
    story = with_models(plane(devices=2), spec("a"), spec("b")).bring_up("a").bring_up("b").given(admit("req_1", "b"))
    story.when(ReportStaged(node="n1", model="a", revision=1, weight_set="ws_a", size_bytes=5, took_ms=1))
    story.when(hello(devices=2, incarnation="inc_2", instances=(found(story),)))
    story.then(
        "NodeJoined", ("InstanceFailed", {"code": "lost", "rung": Rung.UP}), "GrantReturned",
        ("WeightsDropped", {"weight_set": "ws_a", "code": "lost"}),
    )  # fmt: skip
    assert story.fleet.requests["req_1"].lost_ms == story.now
    assert story.instance_of("a").rung is Rung.UP


def test_a_worker_that_restarts_during_a_first_climb_goes_on_with_it() -> None:  # C46
    story = with_models(plane(), spec("a")).given(admit("req_1"))
    up = story.up_report("a")
    story.when(hello(incarnation="inc_2")).then("NodeJoined")
    story.when(up).then("InstanceUp", "RequestRouted")


def test_silence_stops_placement_and_keeps_grants() -> None:
    story = with_models(plane(), spec("a"), spec("b")).bring_up("a")
    story.when(NodeSilent(node="n1")).then("NodeFellSilent").when(NodeSilent(node="n1")).then_nothing()
    story.when(admit("req_1", "b")).then("RequestAccepted", ("RequestQueued", {"code": "node_silent"}))
    story.when(Tick(), after_ms=10_000).then_nothing()
    assert len(story.fleet.grants) == 1
    story.when(NodeHeard(node="n1")).then("NodeHeardAgain", ("InstanceDirected", {"code": "evicted"}), "RequestQueued")
    story.when(NodeHeard(node="n1")).then_nothing()
    story.when(NodeSilent(node="n9")).then_refused(Code.NO_NODE)


def test_a_hello_ends_a_silence() -> None:
    story = plane().given(NodeSilent(node="n1")).when(hello()).then("NodeHeardAgain")
    assert story.fleet.nodes["n1"].heard


def test_a_plane_that_is_ended_in_order_leaves_nothing_to_be_lost_and_a_climb_goes_on_when_it_is_back() -> None:
    story = with_models(plane(devices=3), spec("a"), spec("b"), spec("c")).bring_up("a").bring_up("b")
    story.given(Sleep(model="b")).given(admit("req_1", "c"))
    story.when(ReportStaged(node="n1", model="a", revision=1, weight_set="ws_a", size_bytes=5, took_ms=1))
    slept, climbing = story.instance_of("b").instance, story.fleet.instances[story.find(InstanceDirected)[-1].instance]
    assert climbing.rung is Rung.COLD
    story.when(Farewell(node="n1")).then(
        "NodeLeft", "InstanceEnded", "GrantReturned", ("InstanceEnded", {"instance": slept}), "GrantReturned",
        ("OperationFailed", {"kind": "sleep", "code": "node_left"}),
        ("WeightsDropped", {"code": "left"}), ("RequestQueued", {"code": "node_silent"}),
    )  # fmt: skip
    assert set(story.fleet.instances) == {climbing.instance}
    story.when(Farewell(node="n1")).then_nothing()
    story.when(NodeHeard(node="n1")).then_nothing()
    story.when(Load(model="a")).then("OperationRequested")
    story.when(hello(devices=3, incarnation="inc_2")).then(
        "NodeJoined", "InstanceCreated", "GrantGiven", ("InstanceDirected", {"model": "a"}),
        ("RequestQueued", {"code": "climbing"}),
    )  # fmt: skip
    story.when(story.up_report("c")).then("InstanceUp", "RequestRouted")
    story.when(Farewell(node="n9")).then_refused(Code.NO_NODE)


def test_a_device_in_use_is_not_withdrawn() -> None:
    story = with_models(plane(), spec("a")).bring_up("a")
    story.when(hello(devices=0, instances=(found(story),))).then_nothing()
    story.when(Load(model="a")).then("OperationRequested", "OperationSucceeded")


def test_a_reign_begins_with_its_epoch() -> None:
    story = Story().when(BeginReign(host="h", pid=1, epoch=4)).then(("ReignBegan", {"epoch": 4}))
    assert story.fleet.epoch == 4
