"""The rung `checkpoint`: who goes there, who comes back from there, who waits there."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.commands import (
    Admit,
    ApplySettings,
    Checkpoint,
    End,
    EndRequests,
    ImageFound,
    InstanceFound,
    Load,
    Move,
    RegisterModel,
    ReportCheckpointed,
    ReportEnded,
    ReportFailed,
    ReportImageBuilt,
    ReportModel,
    ReportSaved,
    ReportStaged,
    Save,
    Sleep,
    Tick,
)
from controlplane.decisions import hostroom
from controlplane.events import InstanceDirected, NodeLimits
from controlplane.refusal import Code
from controlplane.rungs import Rung
from controlplane.spec import Idle, ModelFacts, ModelSpec
from tests.unit.decisions.spec import Story, hello, plane, spec, with_models

MINUTE = 60_000
HALF = 400


def house(*, size: int = 800, devices: int = 1, pool_bytes: int = 10_000, **idle: Any) -> Story:
    """Model `a`, whose engine pretends to hold a GPU, is up."""
    story = plane(devices=devices, pool_bytes=pool_bytes)
    return with_models(story, spec("a", size=size, gpu=True, idle=Idle(**idle))).bring_up("a")


def saved(story: Story, name: str) -> Story:
    """It was saved, with an image."""
    story.given(Save(model="a"))
    number, _ = story.directive(name)
    report = ReportImageBuilt(
        node="n1", image="img_1", configuration="cfg_fake:a", size_bytes=10, took_ms=1, proof="same_tokens", fingerprint={},
        zero_bytes=5,
    )  # fmt: skip
    story.given(report)
    return story.given(ReportSaved(node="n1", instance=name, directive=number, image="img_1", took_ms=1))


def test_a_checkpointed_engine_holds_no_cells_and_no_bytes_of_its_device_but_bytes_of_the_host() -> None:
    story = house()
    name = story.instance_of("a").instance
    story.when(Checkpoint(model="a")).then("OperationRequested", ("InstanceDirected", {"rung": Rung.CHECKPOINT}))
    story.report_checkpointed(name, host_bytes=70).then("InstanceCheckpointed", "GrantReturned", "OperationSucceeded")
    instance = story.fleet.instances[name]
    assert (instance.rung, instance.bytes_used, instance.host_bytes, instance.grant) == (Rung.CHECKPOINT, 0, 70, None)
    assert not story.fleet.grants
    story.report_checkpointed(name).then_nothing()


def test_it_comes_back_before_anything_else_is_tried() -> None:
    story = house(devices=2)
    name, device = story.instance_of("a").instance, story.instance_of("a").device
    story.given(Checkpoint(model="a")).report_checkpointed(name)
    story.when(Load(model="a")).then(
        "OperationRequested", ("GrantGiven", {"device": device}), ("InstanceDirected", {"instance": name, "rung": Rung.UP})
    )
    story.report_up("a")
    assert story.fleet.instances[name].host_bytes == 0


def test_where_it_was_is_taken_so_it_goes_elsewhere_on_its_node() -> None:
    story = with_models(house(devices=2), spec("b"))
    name, device = story.instance_of("a").instance, story.instance_of("a").device
    story.given(Checkpoint(model="a")).report_checkpointed(name).bring_up("b")
    other = next(d for d in story.fleet.devices if d != story.instance_of("b").device)
    assert story.instance_of("b").device == device
    story.when(Load(model="a")).then("OperationRequested", ("GrantGiven", {"device": other}), "InstanceDirected")


def test_an_engine_without_a_gpu_is_refused_by_reason() -> None:
    story = with_models(plane(), spec("b")).bring_up("b")
    story.when(Checkpoint(model="b")).then_refused(Code.NOT_AVAILABLE, reason="no_cuda")


def test_a_node_that_cannot_says_why() -> None:
    story = plane(kind="gpu")
    story.given(hello(kind="gpu", incarnation="inc_2", no_checkpoint="driver 550 has no checkpoints: 570 or newer is needed"))
    model = ModelSpec(name="v", source="/models/v", engine="vllm")
    facts = ModelFacts(configuration="cfg_v", architecture="Llama", weight_bytes=300, kv_bytes=0, context_tokens=64)
    story.given(RegisterModel(spec=model))
    story.given(ReportModel(node="n1", model="v", revision=1, facts=facts, engine="vllm", arguments={})).bring_up("v")
    story.when(Checkpoint(model="v")).then_refused(Code.NOT_AVAILABLE, reason="no_cuda")
    assert story.refused is not None
    assert "driver 550" in str(story.refused)


def test_the_longer_it_idles_the_deeper_it_goes() -> None:
    story = house(size=700, sleep_ms=MINUTE, checkpoint_ms=5 * MINUTE, saved_ms=10 * MINUTE, cold_ms=20 * MINUTE)
    name = story.instance_of("a").instance
    story.when(Tick(), after_ms=MINUTE).then(("InstanceDirected", {"rung": Rung.SLEEP, "code": "idle"}))
    story.report_slept(name, bytes_used=50)
    story.when(Tick(), after_ms=5 * MINUTE - 1).then_nothing()
    story.when(Tick(), after_ms=1).then(("InstanceDirected", {"rung": Rung.CHECKPOINT, "code": "idle"}))
    story.report_checkpointed(name)
    story.when(Tick(), after_ms=10 * MINUTE).then("GrantGiven", ("InstanceDirected", {"rung": Rung.SAVED, "code": "idle"}))


def test_without_a_gpu_the_rung_is_left_out() -> None:
    story = with_models(plane(), spec("b", idle=Idle(sleep_ms=1, checkpoint_ms=1, cold_ms=MINUTE))).bring_up("b")
    name = story.instance_of("b").instance
    story.given(Tick(), after_ms=5).report_slept(name)
    story.when(Tick(), after_ms=MINUTE).then(("InstanceDirected", {"rung": Rung.COLD}))


def test_skeletons_that_are_in_the_way_leave_the_device_and_live_on() -> None:
    """Two cells' worth of bytes of a sleeper are what a model of the whole device lacks."""
    story = with_models(house(size=HALF), spec("big"))
    name = story.instance_of("a").instance
    story.given(Sleep(model="a")).report_slept(name, bytes_used=200)
    story.when(Load(model="big"))
    assert [e.type for e in story.events].count("InstanceDirected") == 1
    _, directed = story.directive(name)
    assert (directed.rung, directed.victim_of) == (Rung.CHECKPOINT, "big")
    story.report_checkpointed(name).then("InstanceCheckpointed", "InstanceCreated", "GrantGiven", "InstanceDirected")


def test_ten_sleepers_make_room_for_one_that_takes_nearly_all_and_no_more_of_them_than_must() -> None:
    """N15."""
    small = [spec(f"m{n}", size=50, gpu=True) for n in range(10)]
    story = with_models(plane(device_bytes=1_000), *small, spec("big", size=900))
    for model in small:
        story.bring_up(model.name)
        name = story.instance_of(model.name).instance
        story.given(Sleep(model=model.name)).report_slept(name, bytes_used=30)
    story.when(Load(model="big"))
    told = [e.event.instance for e in story.events if isinstance(e.event, InstanceDirected)]
    assert len(told) == 7, "300 bytes are theirs, 100 may stay"
    assert all(story.directive(name)[1].rung is Rung.CHECKPOINT for name in told)
    for name in told:
        assert not any(i.directive and i.directive.model == "big" for i in story.fleet.instances.values()), (
            "not before they left"
        )
        story.report_checkpointed(name)
    assert story.instance_of("big").grant is not None
    assert sum(i.rung is Rung.SLEEP for i in story.fleet.instances.values()) == 3


def test_whoever_waits_for_a_place_waits_at_checkpoint() -> None:
    story = with_models(house(), spec("b"))
    name = story.instance_of("a").instance
    saved(story, name).bring_up("b")
    busy(story, "b")
    story.when(Load(model="a"))
    number, directed = story.directive(name)
    assert (directed.rung, directed.model, directed.code, directed.grant) == (Rung.CHECKPOINT, "a", "waiting", None)
    story.when(Tick(), after_ms=100).then_nothing()
    story.report_checkpointed(name, image="img_1").then("InstanceCheckpointed")
    assert story.fleet.images["img_1"].uses == 1
    end(story)
    story.report_slept(story.instance_of("b").instance)
    _, directed = story.directive(name)
    assert (directed.rung, directed.model) == (Rung.UP, "a")
    assert number < directed_number(story, name)


def test_a_place_that_is_free_sooner_is_not_waited_for() -> None:
    """It is still on its way from the disk when the place is there: it is told to go on."""
    story = with_models(house(), spec("b"))
    name = story.instance_of("a").instance
    saved(story, name).bring_up("b")
    busy(story, "b")
    story.given(Load(model="a"))
    end(story)
    story.report_slept(story.instance_of("b").instance)
    _, directed = story.directive(name)
    assert directed.rung is Rung.UP
    assert len(story.fleet.instances) == 2


def test_nothing_is_staged_for_a_waiter_that_the_pool_has_no_room_for() -> None:
    story = with_models(house(pool_bytes=900), spec("b"))
    name = story.instance_of("a").instance
    saved(story, name).bring_up("b")
    busy(story, "b")
    story.given(ReportStaged(node="n1", model="b", revision=1, weight_set="ws_b", size_bytes=800, took_ms=1))
    before = story.directive(name)
    story.when(Load(model="a"))
    assert story.directive(name) == before


def test_a_failed_checkpoint_ends_the_operation_and_the_instance() -> None:
    story = house()
    name = story.instance_of("a").instance
    story.given(Checkpoint(model="a"))
    number, _ = story.directive(name)
    report = ReportFailed(
        node="n1", instance=name, directive=number, rung=Rung.UP, step="checkpoint", code="step_deadline", message="lock hung"
    )
    story.when(report).then("InstanceFailed", "GrantReturned", ("OperationFailed", {"code": "step_deadline"}))


def limited(story: Story, limit: int | None) -> Story:
    """Engines off their devices may take that much of the node's memory."""
    return story.given(
        ApplySettings(path="e.toml", digest="d", models=(), node="n1", limits=NodeLimits(checkpoint_bytes=limit))
    )


def test_engines_off_their_devices_take_no_more_of_the_host_than_they_may() -> None:
    story = limited(house(size=HALF), 250)
    name = story.instance_of("a").instance
    story.given(Checkpoint(model="a")).report_checkpointed(name, host_bytes=150)
    assert hostroom.held_bytes(story.fleet, "n1") == 150
    with_models(story, spec("b", size=HALF, gpu=True)).bring_up("b")
    other = story.instance_of("b").instance
    story.given(Sleep(model="b")).report_slept(other, bytes_used=120)
    story.when(Checkpoint(model="b")).then_refused(Code.NOT_AVAILABLE, reason="no_host_memory")
    assert story.refused is not None
    assert "needs 120 B of" in str(story.refused) and "100 B is left" in str(story.refused)
    assert "may take 250 B, and take 150 B" in str(story.refused)
    limited(story, 270).when(Checkpoint(model="b")).then("OperationRequested", "InstanceDirected")
    assert hostroom.held_bytes(story.fleet, "n1") == 270, "promised to the one on its way"
    story.report_checkpointed(other, host_bytes=130)
    assert hostroom.held_bytes(story.fleet, "n1") == 280, "measured is more than was promised"
    story.when(Tick()).then(("InstanceDirected", {"instance": name, "rung": Rung.COLD, "code": "no_host_memory"}))
    story.when(Tick()).then_nothing()


def test_what_one_of_its_kind_took_is_what_the_next_will_need() -> None:
    story = limited(house(), 1000)
    name = story.instance_of("a").instance
    story.given(Checkpoint(model="a")).report_checkpointed(name, host_bytes=70)
    story.bring_up("a")
    assert hostroom.need_bytes(story.fleet, story.fleet.instances[name]) == 70
    limited(story, 69).when(Checkpoint(model="a")).then_refused(Code.NOT_AVAILABLE, reason="no_host_memory")
    limited(story, None).when(Checkpoint(model="a")).then("OperationRequested", "InstanceDirected")


def test_a_wrong_measurement_is_over_once_an_engine_is_started_anew() -> None:
    story = limited(house(), 1000)
    name = story.instance_of("a").instance
    story.given(Checkpoint(model="a")).report_checkpointed(name, host_bytes=1 << 50)
    story.when(Tick()).then(("InstanceDirected", {"rung": Rung.COLD, "code": "no_host_memory"}))
    number, _ = story.directive(name)
    story.given(ReportEnded(node="n1", instance=name, directive=number, took_ms=1)).bring_up("a")
    name = story.instance_of("a").instance
    assert hostroom.need_bytes(story.fleet, story.fleet.instances[name]) < 1000
    story.when(Checkpoint(model="a")).then("OperationRequested", "InstanceDirected")
    story.report_checkpointed(name, host_bytes=70).bring_up("a")
    assert hostroom.need_bytes(story.fleet, story.fleet.instances[name]) == 70, "measured again"
    saved(story, name).bring_up("a")
    assert hostroom.need_bytes(story.fleet, story.fleet.instances[name]) == 15, "that of its image with its zeros"


def test_what_is_needed_and_what_is_left_never_read_the_same() -> None:
    gib = 1 << 30
    story = limited(house(), 3 * gib)
    name = story.instance_of("a").instance
    story.given(Checkpoint(model="a")).report_checkpointed(name, host_bytes=3 * gib).bring_up("a")
    instance = story.fleet.instances[name]
    assert hostroom.lacking(story.fleet, instance) is None
    assert "needs 3.0 GiB of n1's memory off its device, and 2.0 GiB is left" in str(
        hostroom.lacking(limited(story, 2 * gib).fleet, instance)
    )
    assert f"needs {3 * gib} bytes" in (close := str(hostroom.lacking(limited(story, 3 * gib - 1).fleet, instance)))
    assert f"{3 * gib - 1} bytes is left" in close


def test_a_sleeper_in_the_way_goes_past_the_host_where_it_has_no_room() -> None:
    story = limited(with_models(house(size=HALF), spec("big")), 100)
    name = story.instance_of("a").instance
    saved(story, name).bring_up("a")
    story.given(Sleep(model="a")).report_slept(name, bytes_used=200)
    story.when(Load(model="big"))
    _, directed = story.directive(name)
    assert (directed.rung, directed.victim_of) == (Rung.SAVED, "big"), "its image is good: only its process ends"
    bare = limited(with_models(house(size=HALF), spec("big")), 100)
    name = bare.instance_of("a").instance
    bare.given(Sleep(model="a")).report_slept(name, bytes_used=200)
    bare.when(Load(model="big"))
    assert bare.directive(name)[1].rung is Rung.COLD


def test_no_engine_goes_to_an_image_that_its_node_can_no_longer_use() -> None:
    story = house(size=HALF)
    name = story.instance_of("a").instance
    saved(story, name).bring_up("a")
    story.given(Checkpoint(model="a")).report_checkpointed(name, host_bytes=70)
    there = InstanceFound(name, Rung.CHECKPOINT, None, None)
    again = hello(
        incarnation="inc_2", no_images="CRIU is gone", instances=(there,), images=(ImageFound("img_1", "cfg_fake:a", 10),)
    )
    story.given(again)
    assert story.fleet.images["img_1"].state == "ok"
    limited(story, 10).when(Tick()).then(("InstanceDirected", {"instance": name, "rung": Rung.COLD}))


def test_idle_past_its_time_without_room_it_goes_to_disk_where_that_is_asked_for_or_sleeps_on() -> None:
    story = limited(house(size=700, sleep_ms=MINUTE, checkpoint_ms=MINUTE, saved_ms=10 * MINUTE), 10)
    name = story.instance_of("a").instance
    story.given(Tick(), after_ms=MINUTE).report_slept(name, bytes_used=50)
    story.when(Tick(), after_ms=MINUTE).then("GrantGiven", ("InstanceDirected", {"rung": Rung.SAVED, "code": "idle"}))
    other = limited(house(size=700, sleep_ms=MINUTE, checkpoint_ms=MINUTE, cold_ms=5 * MINUTE), 10)
    name = other.instance_of("a").instance
    other.given(Tick(), after_ms=MINUTE).report_slept(name, bytes_used=50)
    other.when(Tick(), after_ms=MINUTE).then_nothing()
    other.when(Tick(), after_ms=4 * MINUTE).then(("InstanceDirected", {"rung": Rung.COLD}))


@pytest.mark.parametrize(("idle", "rung"), [({"checkpoint_ms": 0}, Rung.CHECKPOINT), ({"saved_ms": 0}, Rung.SAVED)])
def test_idle_and_short_of_memory_it_is_not_tried_at_each_tick(idle: dict[str, int], rung: Rung) -> None:
    story = house(size=700, sleep_ms=0, **idle)
    name = story.instance_of("a").instance
    story.given(Tick()).report_slept(name, bytes_used=50)
    for _ in range(3):
        story.given(Tick(), after_ms=1)
        assert story.directive(name)[1].rung is rung
        story.given(replace(story.slept_report(name, bytes_used=50), code="no_memory", message="needs 9 bytes, the host has 8"))
        story.when(Tick(), after_ms=1000).then_nothing()
        story.when(Tick(), after_ms=MINUTE - 1001).then_nothing()


def test_a_waiter_stays_on_disk_where_the_host_has_no_room_for_it() -> None:
    story = with_models(house(), spec("b"))
    name = story.instance_of("a").instance
    saved(story, name).bring_up("b")
    busy(story, "b")
    limited(story, 1)
    story.when(Load(model="a"))
    assert story.fleet.instances[name].rung is Rung.SAVED
    assert story.directive(name)[1].rung is Rung.SAVED


def no_device_memory(story: Story, name: str) -> Story:
    number, _ = story.directive(name)
    return story.when(
        ReportCheckpointed(
            node="n1", instance=name, directive=number, pid=1, took_ms=1, host_bytes=7, code="no_device_memory",
            message="the engine needs 9 bytes of dev0 to come back, 8 are free",
        )
    )  # fmt: skip


def test_one_that_finds_no_room_on_its_device_stays_off_it_and_its_callers_wait_on() -> None:
    """C17, before the driver was asked anything."""
    story = house()
    name = story.instance_of("a").instance
    story.given(Checkpoint(model="a")).report_checkpointed(name)
    request = Admit(request="req_1", model="a", gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9)
    story.given(request)
    no_device_memory(story, name).then(
        ("InstanceDirected", {"rung": Rung.CHECKPOINT, "code": "no_device_memory"}), "InstanceCheckpointed", "GrantReturned",
        ("ModelSetBack", {"code": "no_device_memory"}), ("RequestQueued", {"code": "backing_off"}),
    )  # fmt: skip
    assert "req_1" in story.fleet.requests
    assert not story.fleet.grants
    set_back = story.fleet.models["a"].set_back
    assert set_back is not None and "needs 9 bytes" in set_back.message and "8 are free" in set_back.message
    story.when(Tick(), after_ms=set_back.retry_at_ms - story.now)
    _, directed = story.directive(name)
    assert (directed.rung, directed.model) == (Rung.UP, "a"), "after the back-off it is tried again"
    story.report_up("a")
    assert story.fleet.requests["req_1"].instance == name


def test_a_move_or_a_save_that_finds_no_room_fails_and_the_skeleton_lives_on() -> None:
    story = house(devices=2)
    name, device = story.instance_of("a").instance, story.instance_of("a").device
    other = next(d for d in story.fleet.devices if d != device)
    story.given(Move(what="a", device=other))
    no_device_memory(story, name).then(
        "InstanceDirected", "InstanceCheckpointed", "GrantReturned", "GrantReturned", "ModelSetBack",
        ("OperationFailed", {"kind": "move", "code": "no_device_memory"}),
    )  # fmt: skip
    instance = story.fleet.instances[name]
    assert (instance.rung, instance.grants, instance.directive_settled) == (Rung.CHECKPOINT, (), True)
    second = house()
    name = second.instance_of("a").instance
    second.given(Save(model="a"))
    no_device_memory(second, name).then(
        "InstanceDirected", "InstanceCheckpointed", "GrantReturned", ("OperationFailed", {"kind": "save"})
    )
    assert second.fleet.models["a"].set_back is None


def test_one_that_the_host_has_no_memory_for_sleeps_on_and_its_operation_fails() -> None:
    story = house()
    name = story.instance_of("a").instance
    story.given(Checkpoint(model="a"))
    report = replace(story.slept_report(name, bytes_used=50), code="no_memory", message="needs 9 bytes, the host has 8")
    story.when(report).then(
        ("InstanceDirected", {"rung": Rung.SLEEP, "code": "no_memory"}), "InstanceSlept", "GrantReturned", "SkeletonMeasured",
        ("OperationFailed", {"code": "no_memory"}),
    )  # fmt: skip
    assert story.fleet.instances[name].rung is Rung.SLEEP


def directed_number(story: Story, name: str) -> int:
    return story.directive(name)[0]


def busy(story: Story, model: str) -> None:
    request = Admit(request="req_1", model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9)
    story.given(request).then("RequestAccepted", "RequestRouted")


def end(story: Story) -> None:
    story.given(EndRequests(ends=(End(request="req_1", outcome="finished"),)))
