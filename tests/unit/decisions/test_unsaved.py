"""Who was to go to disk and found no room there: it stays as it is, is not tried for nothing, and goes once there is room."""

from typing import Any

import pytest
from msgspec.structs import replace

from controlplane.commands import InstanceFound, Load, ReportImageRoom, Save, Sleep, Tick
from controlplane.decisions.limits import BACK_OFF_LIMIT_MS, RENEW_AGAIN_MS
from controlplane.fleet import ENGINE_OUTDATED
from controlplane.fleet.images import unsaved
from controlplane.refusal import Code
from controlplane.rungs import Rung
from controlplane.spec import Idle
from tests.unit.decisions.spec import Story, hello, plane, spec, with_models
from tests.unit.decisions.test_image_wishes import stale
from tests.unit.decisions.test_images import MINUTE, built, house, saved

LACKS = "an image needs about 9 GiB of room; /data/images has 8 GiB"


def story_of(**idle: Any) -> tuple[Story, str]:
    """Model `a` sleeps, and its time to go to disk has come."""
    limits = {"sleep_ms": MINUTE, "saved_ms": 10 * MINUTE, "cold_ms": None} | idle
    story = with_models(plane(), spec("a", size=800, idle=Idle(**limits))).bring_up("a")
    name = story.instance_of("a").instance
    story.given(Tick(), after_ms=MINUTE).report_slept(name)
    story.when(Tick(), after_ms=10 * MINUTE).then("GrantGiven", ("InstanceDirected", {"rung": Rung.SAVED, "code": "idle"}))
    return story, name


def falls_short(story: Story, name: str, code: str = "no_space") -> Story:
    return story.when(replace(story.slept_report(name), code=code, message=LACKS))


def room(story: Story, name: str) -> Story:
    return story.when(ReportImageRoom(node="n1", instance=name, directive=story.directive(name)[0]))


@pytest.mark.parametrize("code", ["no_space", "over_quota"])
def test_an_idle_one_without_room_on_disk_sleeps_on_and_says_why_once(code: str) -> None:
    story, name = story_of()
    falls_short(story, name, code).then(
        ("InstanceDirected", {"rung": Rung.SLEEP, "code": code}), ("InstanceSlept", {"code": code, "message": LACKS}),
        "GrantReturned",
    )  # fmt: skip
    instance = story.fleet.instances[name]
    assert (instance.rung, instance.directive_settled, instance.grant) == (Rung.SLEEP, True, None)
    assert instance.unsaved is not None and (instance.unsaved.code, instance.unsaved.message) == (code, LACKS)
    assert story.fleet.models["a"].set_back is None
    assert not story.fleet.images
    for _ in range(100):
        story.when(Tick(), after_ms=60 * MINUTE).then_nothing()


def test_it_goes_to_disk_once_its_node_has_found_room_which_is_told_once() -> None:
    story, name = story_of()
    falls_short(story, name)
    story.given(Tick(), after_ms=60 * MINUTE)
    room(story, name).then("ImageRoomFound")
    room(story, name).then_nothing()
    story.when(Tick()).then("GrantGiven", ("InstanceDirected", {"rung": Rung.SAVED, "code": "idle"}))
    saved(built(story), name)
    assert story.fleet.instances[name].unsaved is None


def test_room_that_is_gone_again_by_the_time_that_it_is_written_to_is_tried_less_and_less_often() -> None:
    story, name = story_of(saved_ms=1)
    waits = []
    for _ in range(9):
        falls_short(story, name)
        room(story, name).then("ImageRoomFound")
        waits.append(0)
        while story.fleet.instances[name].directive_settled:
            story.given(Tick(), after_ms=BACK_OFF_LIMIT_MS)
            waits[-1] += BACK_OFF_LIMIT_MS
    assert waits == [min(BACK_OFF_LIMIT_MS * 2**tries, RENEW_AGAIN_MS) for tries in range(9)]


def test_one_that_finds_no_room_ends_after_its_own_limit() -> None:
    story, name = story_of(cold_ms=30 * MINUTE)
    falls_short(story, name)
    story.when(Tick(), after_ms=20 * MINUTE - 1).then_nothing()
    story.when(Tick(), after_ms=1).then(("InstanceDirected", {"rung": Rung.COLD, "code": "idle"}))


@pytest.mark.parametrize("code", ["no_space", "over_budget"])
def test_one_whose_room_comes_and_goes_ends_after_its_own_limit_from_the_beginning(code: str) -> None:
    """Each try once began that limit anew; `over_budget` is a try that the pool had no room for."""
    story, name = story_of(cold_ms=180 * MINUTE)
    slept_ms, tries = story.now - 10 * MINUTE, 0
    while (directed := story.directive(name)[1]).rung is not Rung.COLD:
        assert story.now < slept_ms + 180 * MINUTE
        if directed.rung is Rung.SAVED:
            tries += 1
            falls_short(story, name, "no_space" if tries == 1 else code)
            room(story, name)
        story.given(Tick(), after_ms=MINUTE)
    assert (story.now - slept_ms, directed.code) == (180 * MINUTE, "idle")
    assert tries > 3


def test_its_limit_begins_once_it_stands_elsewhere_or_was_in_use() -> None:
    story, name = story_of(cold_ms=60 * MINUTE)
    falls_short(story, name, ENGINE_OUTDATED)
    story.given(Tick(), after_ms=30 * MINUTE)
    again(story, name, pid=1)
    assert story.fleet.instances[name].unsaved is not None
    story.when(Tick(), after_ms=60 * MINUTE - 1).then_nothing()
    story.when(Tick(), after_ms=1).then(("InstanceDirected", {"rung": Rung.COLD, "code": "idle"}))


def test_once_it_was_in_use_it_is_tried_anew() -> None:
    story, name = story_of()
    falls_short(story, name)
    story.given(Load(model="a")).report_up("a").given(Sleep(model="a")).report_slept(name)
    assert story.fleet.instances[name].unsaved is None
    story.when(Tick(), after_ms=10 * MINUTE).then("GrantGiven", ("InstanceDirected", {"rung": Rung.SAVED, "code": "idle"}))


def test_it_needs_no_room_once_another_has_written_the_image() -> None:
    story, name = story_of()
    falls_short(story, name)
    built(story)
    assert unsaved(story.fleet, story.fleet.instances[name]) is None
    story.when(Tick(), after_ms=10 * MINUTE).then(("InstanceDirected", {"rung": Rung.SAVED, "code": "idle"}))


def test_room_for_one_that_is_gone_or_lacks_none_says_nothing() -> None:
    story, name = story_of()
    room(story, name).then_nothing()
    story.when(ReportImageRoom(node="n1", instance="ins_gone", directive=1)).then_nothing()


def test_room_is_nothing_to_one_that_another_version_has_started_though_it_once_lacked_that() -> None:
    story, name = story_of()
    falls_short(story, name)
    room(story, name)
    story.given(Tick(), after_ms=10 * MINUTE)
    falls_short(story, name, ENGINE_OUTDATED).then("InstanceDirected", "InstanceSlept", "GrantReturned")
    room(story, name).then_nothing()


def again(story: Story, name: str, pid: int) -> Story:
    """Up and asleep once more."""
    story.given(Load(model="a")).when(replace(story.up_report("a"), pid=pid))
    return story.given(Sleep(model="a")).report_slept(name)


def test_one_that_another_version_has_started_is_not_tried_again_while_its_process_lives() -> None:
    story, name = story_of()
    falls_short(story, name, ENGINE_OUTDATED).then("InstanceDirected", "InstanceSlept", "GrantReturned")
    for _ in range(3):
        story.when(Tick(), after_ms=60 * MINUTE).then_nothing()
        story.when(Save(model="a")).then_refused(Code.NOT_AVAILABLE, reason=ENGINE_OUTDATED)
        again(story, name, pid=1)
    again(story, name, pid=2)
    story.when(Tick(), after_ms=10 * MINUTE).then("GrantGiven", ("InstanceDirected", {"rung": Rung.SAVED, "code": "idle"}))


def test_one_that_another_version_has_started_ends_after_its_own_limit() -> None:
    story, name = story_of(cold_ms=30 * MINUTE)
    falls_short(story, name, ENGINE_OUTDATED)
    story.when(Tick(), after_ms=30 * MINUTE).then(("InstanceDirected", {"rung": Rung.COLD, "code": "idle"}))


def test_one_that_another_version_has_started_goes_to_disk_where_todays_image_is() -> None:
    story, name = story_of()
    falls_short(story, name, ENGINE_OUTDATED)
    built(story)
    story.when(Tick(), after_ms=10 * MINUTE).then(("InstanceDirected", {"rung": Rung.SAVED, "grant": None}))


def test_another_worker_judges_anew_what_another_version_has_started_and_knows_of_the_full_disk() -> None:
    for code, kept in ((ENGINE_OUTDATED, False), ("no_space", True)):
        story, name = story_of()
        falls_short(story, name, code)
        there = InstanceFound(name, Rung.SLEEP, "a", None)
        story.given(hello(incarnation="inc_2", instances=(there,), weight_sets=("ws_a",)))
        assert (story.fleet.instances[name].unsaved is not None) is kept


def test_a_stale_image_is_not_asked_again_and_again_of_a_sleeper_that_another_version_has_started() -> None:
    story = stale(built(house(cold_ms=None))).given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name).given(Tick())
    assert story.directive(name)[1].code == "rebuild"
    falls_short(story, name, ENGINE_OUTDATED).then("InstanceDirected", "InstanceSlept", "GrantReturned")
    for _ in range(3):
        story.when(Tick(), after_ms=RENEW_AGAIN_MS).then_nothing()
