"""Models by name, and the settings file as a difference."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.answer import Done, answer
from controlplane.commands import Admit, ApplySettings, End, EndRequests, Load, RegisterModel, RetireModel, ReviseModel, Tick
from controlplane.decisions.needs import CannotFit, held_bytes
from controlplane.events import NodeLimits, Revision
from controlplane.refusal import Code
from controlplane.rungs import Rung
from controlplane.spec import Idle, ModelSpec
from tests.unit.decisions.spec import DEVICE, Story, facts, hello, inspected, plane, spec, with_models

SMALL = DEVICE // 4


def small(name: str, **more: Any) -> ModelSpec:
    return spec(name, size=SMALL, **more)


def apply(*models: ModelSpec, digest: str = "d1") -> ApplySettings:
    return ApplySettings(path="enginehouse.toml", digest=digest, models=models)


def admit(request: str, model: str) -> Admit:
    return Admit(request=request, model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9)


def loaded() -> Story:
    """A file with four models, all up."""
    story = plane().given(apply(*(small(n) for n in "abcd"))).then(*["ModelRegistered"] * 4, "SettingsApplied")
    for name in "abcd":
        story.given(inspected(small(name))).bring_up(name)
    return story


def test_a_changed_file_touches_only_what_changed() -> None:  # C43
    story = loaded().given(admit("req_d", "d"))
    instances = dict(story.fleet.instances)
    flagged = replace(small("b"), arguments={**small("b").arguments, "max_num_seqs": 2})
    story.when(apply(small("a", idle=Idle(sleep_ms=1)), flagged, small("c"), small("e"), digest="d2"))
    story.then(
        ("ModelRetired", {"model": "d"}), ("ModelRevised", {"model": "a", "hard": False, "revision": 1}),
        ("ModelRevised", {"model": "b", "hard": True, "revision": 2}), ("ModelRegistered", {"model": "e"}),
        ("SettingsApplied", {
            "added": ("e",), "retired": ("d",), "unchanged": 1,
            "revised": (Revision("a", ("idle",)), Revision("b", ("arguments",))),
        }),
    )  # fmt: skip
    assert dict(story.fleet.instances) == instances, "nothing was stopped"
    story.when(admit("req_b", "b")).then("RequestAccepted", "RequestRouted")
    story.when(Tick(), after_ms=1).then(("InstanceDirected", {"code": "idle"}))
    story.when(EndRequests(ends=(End(request="req_d", outcome="finished"),))).then("RequestFinished")
    story.when(Tick(), after_ms=1).then(("InstanceDirected", {"code": "retired", "rung": Rung.COLD}))


def test_a_hard_field_counts_at_the_next_load() -> None:  # C43
    story = with_models(plane(), spec("a")).bring_up("a")
    revised = replace(spec("a"), source="fake:other")
    story.when(ReviseModel(spec=revised)).then(("ModelRevised", {"fields": ("source",), "hard": True}))
    story.when(admit("req_1", "a")).then("RequestAccepted", "RequestRouted")
    story.when(Load(model="a")).then("OperationRequested")
    story.when(inspected(spec("a"))).then_refused(Code.STALE)
    story.when(inspected(revised, revision=2)).then("ModelInspected", "ConfigurationFound")
    story.when(EndRequests(ends=(End(request="req_1", outcome="finished"),)))
    story.then("RequestFinished", ("InstanceDirected", {"rung": Rung.SLEEP, "victim_of": "a"}))
    old = next(iter(story.fleet.instances))
    story.report_slept(old).then("InstanceSlept", "GrantReturned", "InstanceCreated", "GrantGiven", "InstanceDirected")
    story.report_up("a").then("InstanceUp", "OperationSucceeded")


def test_who_waits_for_a_skeleton_to_take_a_new_revision_is_told_that_and_not_that_it_leaves_itself() -> None:
    revised = replace(spec("a"), source="fake:other")
    story = with_models(plane(), spec("a")).bring_up("a").given(ReviseModel(spec=revised)).given(Load(model="a"))
    story.given(replace(inspected(revised, revision=2), facts=facts(spec("a"))))
    takes = {"code": "climbing", "reason": "a takes over on cpu0 from an earlier revision"}
    story.when(admit("req_1", "a")).then("RequestAccepted", ("RequestQueued", takes))


def test_an_unchanged_file_changes_nothing() -> None:  # C43
    loaded().when(apply(*(small(n) for n in "abcd"), digest="d3")).then_nothing()


def test_a_file_changes_its_nodes_limits_at_once_and_the_log_has_both() -> None:  # C43
    story = plane()
    limits = NodeLimits(image_quota_bytes=5, image_pins=("a",), checkpoint_bytes=9)
    order = ApplySettings(path="e.toml", digest="d", models=(), node="n1", limits=limits)
    story.when(order).then(
        ("NodeLimitsChanged", {"before": NodeLimits(), "after": limits}),
        ("SettingsApplied", {"limits": ("image_quota_bytes", "image_pins", "checkpoint_bytes")}),
    )
    assert story.fleet.nodes["n1"].limits == limits
    story.when(order).then_nothing()
    other = ApplySettings(path="e.toml", digest="d", models=(), node="n9", limits=NodeLimits())
    story.when(other).then_nothing()  # it has not joined: its hello brings them


def test_a_file_retires_only_what_a_file_registered() -> None:  # C43
    story = with_models(plane(), small("api")).given(apply(small("a")))
    story.when(apply(digest="d2")).then(("ModelRetired", {"model": "a"}), "SettingsApplied")
    story.when(apply(small("api"), digest="d3")).then_refused(Code.MODEL_EXISTS, model="api")


def test_what_an_operator_does_over_the_settings_file_is_said_to_last_until_that_is_applied_next() -> None:
    file = (small("a"), small("b"))
    story = with_models(plane(), small("api")).given(apply(*file))
    story.when(ReviseModel(spec=small("a", note="mine"))).then(("ModelRevised", {"over_settings": True}))
    told = answer(story.events)
    assert isinstance(told, Done) and "write it there, too" in told.note
    story.when(RetireModel(model="b")).then(("ModelRetired", {"over_settings": True}))
    told = answer(story.events)
    assert isinstance(told, Done) and told.note.startswith("b is in the settings file still, and comes back")
    story.when(apply(*file, digest="d2")).then(
        ("ModelRevised", {"model": "a", "over_settings": False}), ("ModelRegistered", {"model": "b"}), "SettingsApplied"
    )
    story.when(RetireModel(model="api")).then(("ModelRetired", {"over_settings": False}))
    told = answer(story.events)
    assert isinstance(told, Done) and told.note == ""
    story.when(apply(digest="d3")).then(
        ("ModelRetired", {"model": "a", "over_settings": False}), "ModelRetired", "SettingsApplied"
    )


def test_a_file_that_is_wrong_somewhere_changes_nothing() -> None:  # C43
    story = loaded()
    story.when(apply(small("a"), small("x", aliases=("a",)))).then_refused(Code.MODEL_EXISTS)
    story.when(apply(small("x"), spec("y", size=DEVICE + 1))).then_refused(Code.CANNOT_FIT)


def test_a_name_means_one_model() -> None:
    story = with_models(plane(), small("a", aliases=("x",)))
    story.when(RegisterModel(spec=small("a"))).then_refused(Code.MODEL_EXISTS)
    story.when(RegisterModel(spec=small("x"))).then_refused(Code.MODEL_EXISTS)
    story.when(RegisterModel(spec=small("b", aliases=("x",)))).then_refused(Code.MODEL_EXISTS, models=["a", "b"])
    story.when(RegisterModel(spec=small("b", aliases=("b",)))).then_refused(Code.MODEL_EXISTS)
    story.when(RegisterModel(spec=small("b", aliases=("y",)))).then("ModelRegistered")
    story.when(ReviseModel(spec=small("x"))).then_refused(Code.MODEL_UNKNOWN, model="a")


def test_a_revision_that_changes_nothing_is_no_event() -> None:
    with_models(plane(), small("a")).when(ReviseModel(spec=small("a"))).then_nothing()


def test_a_retired_name_can_be_used_again_and_the_old_instance_does_not_serve_it() -> None:
    story = with_models(plane(devices=2), spec("a")).bring_up("a").given(admit("req_1", "a")).given(RetireModel(model="a"))
    story.when(RetireModel(model="a")).then_nothing()
    story.when(RegisterModel(spec=spec("a", source="new"))).then(("ModelRegistered", {"revision": 2}))
    story.when(inspected(spec("a", source="new"), revision=2)).then("ModelInspected", "ConfigurationFound")
    story.when(admit("req_2", "a")).then(
        "RequestAccepted", "InstanceCreated", "GrantGiven", "InstanceDirected", "RequestQueued"
    )
    story.when(EndRequests(ends=(End(request="req_1", outcome="finished"),))).then("RequestFinished")
    story.when(Tick()).then(("InstanceDirected", {"rung": Rung.COLD, "code": "retired"}))


def test_a_model_too_large_for_every_device_is_rejected_when_it_has_been_opened() -> None:  # C14
    real = ModelSpec(name="big", source="/models/big")
    story = plane().given(RegisterModel(spec=real)).given(admit("req_1", "big")).given(Load(model="big"))
    story.when(replace(inspected(spec("big", size=960)), engine="transformers"))
    story.then(
        "ModelInspected", "ConfigurationFound", ("ModelRejected", {"need_bytes": 960, "limit_bytes": 800}),
        ("RequestFailed", {"code": "cannot_fit"}), ("OperationFailed", {"code": "cannot_fit"}),
    )  # fmt: skip
    story.when(admit("req_2", "big")).then_refused(Code.CANNOT_FIT, need_bytes=960, limit_bytes=800)
    story.when(Load(model="big")).then_refused(Code.CANNOT_FIT)
    story.when(hello(device_bytes=1_000)).then("DeviceDeclared", "ModelCleared")
    story.when(admit("req_3", "big")).then(
        "RequestAccepted", "InstanceCreated", "GrantGiven", "InstanceDirected", "RequestQueued"
    )


@pytest.mark.parametrize(("kv_bytes", "helps"), [(100, False), (160, True)])
def test_a_smaller_kv_is_advised_only_where_that_would_do(kv_bytes: int, helps: bool) -> None:
    said = CannotFit("device", 960, 800, kv_bytes).message("big")
    assert "declare a larger device" in said and ("kv_bytes" in said) is helps


def test_an_assumed_skeleton_takes_the_whole_device_but_never_refuses() -> None:
    """512 MiB are assumed until one has been measured; the model and its assumed skeleton exceed the device."""
    story = plane(device_bytes=1 << 30, pool_bytes=1 << 40)
    real = ModelSpec(name="m", source="/models/m")
    story.given(RegisterModel(spec=real)).given(replace(inspected(spec("m", size=(1 << 30) - 5)), engine="transformers"))
    story.when(Load(model="m")).then("OperationRequested", "InstanceCreated", ("GrantGiven", {"cells": 8}), "InstanceDirected")
    story.report_up("m")


def test_a_revision_during_a_climb_does_not_free_what_was_promised_to_it() -> None:
    half = DEVICE // 2
    story = with_models(plane(), spec("a", size=half), spec("b", size=half)).given(Load(model="a"))
    story.given(ReviseModel(spec=replace(spec("a", size=half), source="fake:other")))
    assert [held_bytes(story.fleet, i, i.device or "") for i in story.fleet.instances.values()] == [half]
