"""Skeletons on disk: who goes there, when, what comes of their images."""

from typing import Any

import pytest

from controlplane.commands import (
    Admit,
    ImageFound,
    Load,
    ReportEnded,
    ReportFailed,
    ReportImageBuilt,
    ReportImageFailed,
    ReportImageRefused,
    ReportImageRemoved,
    ReportSaved,
    ReviseModel,
    Save,
    Sleep,
    Stop,
    Tick,
)
from controlplane.decisions.limits import OVERDUE_MS
from controlplane.events import InstanceDirected, OperationFailed, OperationSucceeded
from controlplane.refusal import Code
from controlplane.rungs import Rung
from controlplane.spec import Idle
from tests.unit.decisions.spec import Story, hello, inspected, plane, spec, with_models

MINUTE = 60_000


def house(*, size: int = 800, **idle: Any) -> Story:
    """Model `a` is up."""
    return with_models(plane(), spec("a", size=size, idle=Idle(**idle))).bring_up("a")


def built(story: Story, image: str = "img_1", configuration: str = "cfg_fake:a") -> Story:
    report = ReportImageBuilt(
        node="n1", image=image, configuration=configuration, size_bytes=10, took_ms=1, proof="same_tokens", fingerprint={}
    )
    return story.when(report)


def saved(story: Story, instance: str, image: str = "img_1") -> Story:
    number, e = story.directive(instance)
    assert e.rung is Rung.SAVED
    return story.when(ReportSaved(node="n1", instance=instance, directive=number, image=image, took_ms=1))


def test_a_model_is_saved_and_gives_its_place_back() -> None:
    story = house()
    name = story.instance_of("a").instance
    story.when(Save(model="a")).then("OperationRequested", ("InstanceDirected", {"rung": Rung.SAVED, "model": "a"}))
    built(story).then("ImageBuilt")
    saved(story, name).then("InstanceSaved", "GrantReturned", "OperationSucceeded")
    instance = story.fleet.instances[name]
    assert (instance.rung, instance.image, instance.device, instance.bytes_used) == (Rung.SAVED, "img_1", None, 0)
    saved(story, name).then_nothing()


def test_what_was_saved_is_brought_back_before_a_new_one_is_made() -> None:
    story = house()
    name = story.instance_of("a").instance
    saved(built(story.given(Save(model="a"))), name)
    story.when(Load(model="a")).then("OperationRequested", "GrantGiven", ("InstanceDirected", {"instance": name}))
    story.report_up("a").then("InstanceUp", "OperationSucceeded")


def test_a_sleeper_needs_its_place_for_the_proof_of_a_new_image_and_none_once_there_is_one() -> None:
    story = house().given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name)
    story.when(Save(model="a")).then("OperationRequested", "GrantGiven", "InstanceDirected")
    saved(built(story), name)
    story.given(Load(model="a")).report_up("a").given(Sleep(model="a")).report_slept(name)
    story.when(Save(model="a")).then("OperationRequested", ("InstanceDirected", {"grant": None}))


def test_a_sleeper_whose_place_is_held_idly_is_given_it() -> None:
    story = with_models(house(), spec("b")).given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name).bring_up("b")
    other = story.instance_of("b").instance
    evicted = {"instance": other, "rung": Rung.SLEEP, "code": "evicted", "victim_of": "a"}
    story.when(Save(model="a")).then("OperationRequested", ("InstanceDirected", evicted))
    story.when(Tick(), after_ms=1000).then_nothing()
    story.report_slept(other)
    assert story.directive(name)[1].rung is Rung.SAVED
    assert [o.kind for o in story.fleet.operations.values()] == ["save"]


def test_a_sleeper_whose_place_is_in_use_is_saved_when_it_is_free() -> None:
    story = with_models(house(), spec("b")).given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name).bring_up("b")
    story.given(Admit(request="req_1", model="b", gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9))
    story.when(Save(model="a")).then("OperationRequested")
    story.when(Tick(), after_ms=1000).then_nothing()
    story.given(Stop(model="b"))
    number, e = story.directive(story.instance_of("b").instance)
    from controlplane.commands import ReportEnded  # noqa: PLC0415

    story.when(ReportEnded(node="n1", instance=e.instance, directive=number, took_ms=1))
    assert story.directive(name)[1].rung is Rung.SAVED
    assert [o.kind for o in story.fleet.operations.values()] == ["save"]


def test_a_save_that_finds_no_place_ends_and_says_what_it_lacked() -> None:
    story = with_models(house(), spec("b")).given(Sleep(model="a"))
    story.report_slept(story.instance_of("a").instance).bring_up("b")
    story.given(Admit(request="req_1", model="b", gateway="gw_1", kind="chat", streamed=True, prompt_bytes=9))
    story.when(Save(model="a")).then("OperationRequested")
    story.when(Tick(), after_ms=OVERDUE_MS - 1).then_nothing()
    story.when(Tick(), after_ms=1).then(("OperationFailed", {"kind": "save", "code": "queue_timeout"}))
    failed = story.events[-1].event
    assert "needs 800 B of dev0 (800 B), and others held too much of it" in failed.message
    assert story.instance_of("a").rung is Rung.SLEEP


def test_an_idle_model_goes_down_one_rung_after_the_other() -> None:
    story = house(sleep_ms=5 * MINUTE, saved_ms=10 * MINUTE, cold_ms=60 * MINUTE)
    name = story.instance_of("a").instance
    story.when(Tick(), after_ms=5 * MINUTE).then(("InstanceDirected", {"rung": Rung.SLEEP, "code": "idle"}))
    story.report_slept(name)
    story.when(Tick(), after_ms=9 * MINUTE).then_nothing()
    story.when(Tick(), after_ms=MINUTE).then("GrantGiven", ("InstanceDirected", {"rung": Rung.SAVED, "code": "idle"}))
    saved(built(story), name)
    story.when(Tick(), after_ms=59 * MINUTE).then_nothing()
    story.when(Tick(), after_ms=MINUTE).then(("InstanceDirected", {"rung": Rung.COLD}))


def test_where_nothing_can_be_saved_the_ladder_is_shorter_and_an_order_is_refused_with_the_reason() -> None:
    story = house(sleep_ms=MINUTE, saved_ms=MINUTE, cold_ms=5 * MINUTE)
    name = story.instance_of("a").instance
    from controlplane.commands import InstanceFound  # noqa: PLC0415

    there = InstanceFound(name, Rung.UP, "a", story.instance_of("a").grant)
    story.given(hello(incarnation="inc_2", no_images="CRIU was not found", instances=(there,), weight_sets=("ws_a",)))
    story.when(Save(model="a")).then_refused(Code.NOT_AVAILABLE, reason="not_available")
    story.given(Tick(), after_ms=MINUTE).report_slept(name)
    story.when(Tick(), after_ms=2 * MINUTE).then_nothing()
    story.when(Tick(), after_ms=3 * MINUTE).then(("InstanceDirected", {"rung": Rung.COLD}))


def test_a_failed_image_bars_further_saves_until_it_is_removed() -> None:
    story = house()
    failed = ReportImageFailed(
        node="n1", image="img_1", configuration="cfg_fake:a", step="restore", code="restore_failed", message="criu: no"
    )
    story.when(failed).then("ImageFailed")
    story.when(failed).then_nothing()
    story.when(Save(model="a")).then_refused(Code.NOT_AVAILABLE, reason="image_failed")
    story.when(ReportImageRemoved(node="n1", image="img_1", code="operator")).then("ImageRemoved")
    story.when(Save(model="a")).then("OperationRequested", "InstanceDirected")


def test_a_save_that_fails_fails_its_operation_and_does_not_set_the_model_back() -> None:
    story = house().given(Save(model="a"))
    name = story.instance_of("a").instance
    number, _ = story.directive(name)
    report = ReportFailed(
        node="n1", instance=name, directive=number, rung=Rung.UP, step="build", code="dump_failed", message="criu: no"
    )
    story.when(report).then("InstanceFailed", "GrantReturned", ("OperationFailed", {"code": "dump_failed"}))
    assert story.fleet.models["a"].set_back is None


def test_a_refused_image_is_known_with_its_reason_and_made_anew() -> None:
    story = built(house())
    refused = ReportImageRefused(node="n1", image="img_1", configuration="cfg_fake:a", code="kernel_changed", message="so")
    story.when(refused).then("ImageRefused")
    story.when(refused).then_nothing()
    assert story.fleet.images["img_1"].state == "refused"
    built(story).then("ImageBuilt")
    assert story.fleet.images["img_1"].state == "ok"


@pytest.mark.parametrize("there", [True, False])
def test_a_worker_that_starts_says_which_images_it_has_and_saved_instances_are_not_lost(there: bool) -> None:
    story = house()
    name = story.instance_of("a").instance
    saved(built(story.given(Save(model="a"))), name)
    images = (ImageFound("img_1", "cfg_fake:a", 10),) if there else ()
    story.when(hello(incarnation="inc_2", images=images, weight_sets=("ws_a",)))
    assert name in story.fleet.instances
    assert ("img_1" in story.fleet.images) is there


def test_an_image_that_is_built_again_after_its_removal_goes_on_with_its_stream() -> None:
    story = built(house())
    story.when(ReportImageRemoved(node="n1", image="img_1", code="operator")).then("ImageRemoved")
    built(story).then("ImageBuilt")
    assert story.events[0].version == 3


def test_an_image_that_the_plane_does_not_know_is_taken_up() -> None:
    story = plane().when(hello(incarnation="inc_2", images=(ImageFound("img_9", "cfg_x", 10, zero_bytes=5),)))
    found = story.fleet.images["img_9"]
    assert (found.state, found.size_bytes, found.zero_bytes) == ("ok", 10, 5)


def test_a_save_of_what_ends_before_it_gets_there_has_not_succeeded() -> None:
    story = house()
    name = story.instance_of("a").instance
    story.when(Save(model="a")).when(Stop(model="a"))
    number, e = story.directive(name)
    assert e.rung is Rung.COLD
    story.when(ReportEnded(node="n1", instance=name, directive=number, took_ms=1)).then(
        "InstanceEnded", "GrantReturned", ("OperationFailed", {"kind": "save", "code": "superseded"}),
        ("OperationSucceeded", {"kind": "stop"}),
    )  # fmt: skip


def test_a_save_that_waits_for_a_climb_fails_with_it() -> None:
    story = house()
    story.when(Stop(model="a"))
    name = story.instance_of("a").instance
    story.when(ReportEnded(node="n1", instance=name, directive=story.directive(name)[0], took_ms=1))
    story.when(Load(model="a")).when(Save(model="a"))
    climbing = story.find(InstanceDirected)[-1].instance
    number, e = story.directive(climbing)
    assert e.rung is Rung.UP
    story.when(
        ReportFailed(
            node="n1", instance=climbing, directive=number, rung=Rung.COLD, step="connect", code="start_failed", message="so"
        )
    )  # fmt: skip
    assert [(o.kind, o.code) for o in story.find(OperationFailed)] == [("load", "superseded"), ("save", "start_failed")]
    assert not [o for o in story.find(OperationSucceeded) if o.kind == "save"]


def test_a_save_of_one_is_no_failure_because_another_of_the_model_was_ending_already() -> None:
    story = house(cold_ms=MINUTE)
    other = story.instance_of("a").instance
    story.when(Sleep(model="a")).report_slept(other)
    revised = spec("a", size=800, source="b", idle=Idle(cold_ms=MINUTE))
    story.when(ReviseModel(spec=revised)).when(inspected(revised, 2)).when(Load(model="a"))
    up = story.find(InstanceDirected)[-1].instance
    assert up != other
    story.report_up("a").when(Tick(), after_ms=MINUTE)
    number, ending = story.directive(other)
    assert ending.rung is Rung.COLD
    story.when(Save(model="a"))
    story.when(ReportEnded(node="n1", instance=other, directive=number, took_ms=1))
    assert not story.find(OperationFailed)
    saved(built(story, configuration="cfg_fake:b"), up)
    assert story.find(OperationSucceeded)[-1].kind == "save"
