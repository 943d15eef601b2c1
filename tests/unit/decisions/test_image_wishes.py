"""What becomes of images that are stale, pinned, or named to leave the disk."""

import pytest
from msgspec.structs import replace

from controlplane.commands import (
    ImageFound,
    InstanceFound,
    Load,
    PinImage,
    RebuildImage,
    RemoveImage,
    ReportFailed,
    ReportImageFailed,
    ReportImageRefused,
    ReportImageRemoved,
    RetireModel,
    Save,
    Sleep,
    Tick,
)
from controlplane.decisions.limits import RENEW_AGAIN_MS
from controlplane.fleet.images import idle_pins
from controlplane.refusal import Code
from controlplane.rungs import Rung
from tests.unit.decisions.spec import Story, hello, plane, spec, with_models
from tests.unit.decisions.test_admission import admit, done
from tests.unit.decisions.test_images import built, house


def stale(story: Story, image: str = "img_1", code: str = "kernel_changed", configuration: str = "cfg_fake:a") -> Story:
    return story.when(ReportImageRefused(node="n1", image=image, configuration=configuration, code=code, message="so"))


def test_a_stale_image_is_made_anew_while_its_skeleton_sleeps_and_the_skeleton_sleeps_on() -> None:
    story = stale(built(house()))
    name = story.instance_of("a").instance
    story.when(Tick()).then_nothing()
    story.given(Sleep(model="a")).report_slept(name)
    told = {"rung": Rung.SLEEP, "code": "rebuild", "model": "a", "need_bytes": 800}
    story.when(Tick()).then("GrantGiven", ("InstanceDirected", told))
    story.when(Tick()).then_nothing()
    built(story, "img_2")
    story.report_slept(name).then("InstanceSlept", "GrantReturned")
    assert story.fleet.instances[name].directive_settled
    story.report_slept(name).then_nothing()
    story.when(ReportImageRemoved(node="n1", image="img_1", code="replaced"))
    story.when(Tick()).then_nothing()


def test_a_stale_image_is_not_made_anew_while_anybody_waits_or_where_a_good_or_a_failed_one_is() -> None:
    story = with_models(stale(built(house())), spec("b")).given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name)
    story.given(Load(model="b"))
    story.when(Tick()).then_nothing()
    story.report_up("b")
    story.when(Tick()).then_nothing()  # its place is taken
    other = stale(built(built(house()), "img_2")).given(Sleep(model="a"))
    other.report_slept(other.instance_of("a").instance)
    other.when(Tick()).then_nothing()
    third = stale(built(house()))
    third.given(
        ReportImageFailed(node="n1", image="img_3", configuration="cfg_fake:a", step="build", code="dump_failed", message="no")
    ).given(Sleep(model="a"))
    third.report_slept(third.instance_of("a").instance)
    third.when(Tick()).then_nothing()


def test_who_asks_while_an_image_is_made_anew_waits_for_that_skeleton_and_no_other_is_begun() -> None:
    story = stale(built(house(size=100))).given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name).given(Tick())
    story.when(Load(model="a")).then("OperationRequested")
    assert len(story.fleet.instances) == 1
    built(story, "img_2")
    story.report_slept(name).then(
        "InstanceSlept", "GrantReturned", "GrantGiven", ("InstanceDirected", {"instance": name, "rung": Rung.UP})
    )


def test_a_rebuild_that_fails_ends_the_skeleton_gives_the_place_back_and_sets_nobody_back() -> None:
    story = stale(built(house())).given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name).given(Tick())
    number, _ = story.directive(name)
    report = ReportFailed(
        node="n1", instance=name, directive=number, rung=Rung.SLEEP, step="build", code="dump_failed", message="no"
    )
    story.when(report).then("InstanceFailed", "GrantReturned")
    assert story.fleet.models["a"].set_back is None


@pytest.mark.parametrize("code", ["no_memory", "over_budget", "no_space", "over_quota"])
def test_a_rebuild_without_room_leaves_its_skeleton_asleep_and_is_not_tried_again_at_once(code: str) -> None:
    story = stale(built(house(cold_ms=None))).given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name).given(Tick())
    report = replace(story.slept_report(name), code=code, message="needs 9 bytes, the host has 8")
    story.when(report).then(
        ("InstanceDirected", {"rung": Rung.SLEEP, "code": code}), ("InstanceSlept", {"instance": name}), "GrantReturned"
    )
    story.when(report).then_refused(Code.STALE)
    sleeper = story.fleet.instances[name]
    assert (sleeper.rung, sleeper.directive_settled, sleeper.grant) == (Rung.SLEEP, True, None)
    assert (story.fleet.models["a"].set_back, story.fleet.images["img_1"].state) == (None, "refused")
    story.when(Tick(), after_ms=RENEW_AGAIN_MS - 1).then_nothing()
    story.when(Tick(), after_ms=1).then("GrantGiven", ("InstanceDirected", {"code": "rebuild"}))


def test_a_rebuild_without_room_is_tried_again_once_its_skeleton_was_in_use() -> None:
    story = stale(built(house())).given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name).given(Tick())
    story.given(replace(story.slept_report(name), code="no_memory", message="so"))
    story.given(Load(model="a")).report_up("a").given(Sleep(model="a")).report_slept(name)
    story.when(Tick()).then("GrantGiven", ("InstanceDirected", {"code": "rebuild"}))


def test_a_stale_image_is_made_anew_by_whichever_of_its_sleepers_has_a_place() -> None:
    story = with_models(plane(devices=2), spec("a", source="x"), spec("b", source="x"), spec("c")).bring_up("a")
    story.given(admit("req_1", "a")).bring_up("b").given(done("req_1"))
    first, second = sorted(story.fleet.instances.values(), key=lambda i: i.instance)
    for one in (first, second):
        story.given(Sleep(model=one.model or "")).report_slept(one.instance)
    story.bring_up("c")
    other = second if story.instance_of("c").device == first.device else first
    built(story, configuration="cfg_fake:x")
    stale(story, configuration="cfg_fake:x")
    story.when(Tick()).then("GrantGiven", ("InstanceDirected", {"instance": other.instance, "code": "rebuild"}))
    story.when(Tick()).then_nothing()
    assert first.device != second.device and other is second, "the one that is looked at first has none"


def test_asleep_as_directed_it_can_not_have_failed_to_get_there() -> None:
    story = house().given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.when(replace(story.slept_report(name), code="no_memory", message="so")).then_refused(Code.STALE)


def test_a_removal_is_an_event_of_whoever_asked_and_the_node_carries_it_out() -> None:
    story = built(house())
    story.when(RemoveImage(image="img_1")).then(("ImageDismissed", {"code": "operator"}))
    assert story.log[-1].actor == "test"
    story.when(RemoveImage(image="img_1")).then_nothing()
    story.when(ReportImageRemoved(node="n1", image="img_1", code="operator")).then(("ImageRemoved", {"by": "test"}))
    story.when(RemoveImage(image="img_1")).then_refused(Code.IMAGE_UNKNOWN)


def test_a_dismissed_image_that_the_next_worker_finds_usable_again_is_still_to_go() -> None:
    story = stale(built(house()))
    story.given(RemoveImage(image="img_1"))
    there = InstanceFound(story.instance_of("a").instance, Rung.UP, "a", story.instance_of("a").grant)
    image = ImageFound("img_1", "cfg_fake:a", 10)
    story.given(hello(incarnation="inc_2", images=(image,), instances=(there,), weight_sets=("ws_a",)))
    assert story.fleet.images["img_1"].leaving == "test"
    story.when(ReportImageRemoved(node="n1", image="img_1", code="operator")).then(("ImageRemoved", {"by": "test"}))


def test_a_pin_spares_from_the_quota_and_goes_over_to_the_next_image_but_not_from_an_operators_hand() -> None:
    story = built(house())
    story.when(PinImage(image="img_1")).then(("ImagePinned", {"pinned": True}))
    story.when(PinImage(image="img_1")).then_nothing()
    story.when(RemoveImage(image="img_1", code="quota")).then_refused(Code.NOT_AVAILABLE, reason="pinned")
    built(story, "img_2")
    assert story.fleet.images["img_2"].pinned
    story.when(PinImage(image="img_2", pinned=False)).then("ImagePinned")
    story.when(RemoveImage(image="img_1")).then("ImageDismissed")


@pytest.mark.parametrize("pin", ["a", "cfg_fake:a"])
def test_the_settings_pin_by_model_or_configuration(pin: str) -> None:
    story = built(house())
    there = InstanceFound(story.instance_of("a").instance, Rung.UP, "a", story.instance_of("a").grant)
    image = ImageFound("img_1", "cfg_fake:a", 10)
    story.given(hello(incarnation="inc_2", images=(image,), image_pins=(pin,), instances=(there,), weight_sets=("ws_a",)))
    story.when(RemoveImage(image="img_1", code="quota")).then_refused(Code.NOT_AVAILABLE, reason="pinned")


def test_a_pin_that_no_model_and_no_configuration_has_is_named_until_one_has() -> None:
    story = with_models(plane(), spec("writer", aliases=("default",)), spec("gone")).given(RetireModel(model="gone"))
    pins = ("writer", "cfg_fake:writer", "default", "writr", "gone")
    alias, near, gone = idle_pins(story.fleet, pins)
    assert alias == '[images] pin: "default" is an alias, and pins nothing: write "writer"'
    assert near.endswith('is called "writr", so it pins nothing until one is; did you mean "writer"?')
    assert '"gone"' in gone
    with_models(story, spec("writr"))
    assert len(idle_pins(story.fleet, pins)) == 2


def test_an_image_that_is_asked_for_anew_is_stale_at_once_whatever_it_was_and_stays_so_for_the_next_worker() -> None:
    story = house()
    story.given(
        ReportImageFailed(node="n1", image="img_1", configuration="cfg_fake:a", step="verify", code="image_corrupt", message="")
    )
    story.when(Save(model="a")).then_refused(Code.NOT_AVAILABLE, reason="image_failed")
    story.when(RebuildImage(image="img_1")).then(("ImageRefused", {"code": "operator"}))
    story.when(RebuildImage(image="img_1")).then_nothing()
    name = story.instance_of("a").instance
    there = InstanceFound(name, Rung.UP, "a", story.instance_of("a").grant)
    image = ImageFound("img_1", "cfg_fake:a", 10)
    story.given(hello(incarnation="inc_2", images=(image,), instances=(there,), weight_sets=("ws_a",)))
    assert story.fleet.images["img_1"].state == "refused"
    story.given(Sleep(model="a")).report_slept(name)
    story.when(Tick()).then("GrantGiven", ("InstanceDirected", {"code": "rebuild"}))
