"""A skeleton sleeps, its place is taken, and another device of its node is free: it is brought there, not started anew."""

from msgspec.structs import replace

from controlplane.commands import ReportFailed, ReportImageBuilt, ReportSlept
from controlplane.decisions.board import Board
from controlplane.decisions.needs import held_bytes
from controlplane.decisions.plan import plan
from controlplane.events import InstanceCreated, RequestQueued
from controlplane.rungs import Rung
from tests.unit.decisions.spec import Story, plane, spec, with_models
from tests.unit.decisions.test_admission import admit, done

SIZE, SKELETON = 700, 40


def asleep(*, gpu: bool) -> Story:
    """`a` sleeps on the first device, which `b` needs; the second is free."""
    models = [spec(name, size=SIZE, gpu=gpu) for name in "abc"]
    story = with_models(plane(devices=2, kind="gpu" if gpu else "cpu"), *models).bring_up("a").bring_up("c")
    story.given(admit("req_b", "b"))
    story.report_slept(story.instance_of("a").instance, bytes_used=SKELETON).report_up("b")
    end(story, "c")
    assert [g.device for g in story.fleet.grants.values()] == ["dev0"]
    return story


def end(story: Story, model: str) -> None:
    """Its engine is gone, and its place free."""
    fail(story, story.instance_of(model).instance, "engine_died")


def fail(story: Story, instance: str, code: str) -> None:
    number, e = story.directive(instance)
    report = ReportFailed(node="n1", instance=instance, directive=number, rung=e.rung, step="", code=code, message="no")
    story.when(report)
    assert instance not in story.fleet.instances


def sleeper(story: Story) -> str:
    return next(i.instance for i in story.fleet.instances.values() if i.rung in (Rung.SLEEP, Rung.CHECKPOINT))


def test_one_that_holds_no_gpu_changes_its_cells() -> None:
    story = asleep(gpu=False)
    known = sleeper(story)
    story.when(admit("req_1", "a")).then(
        "RequestAccepted", ("GrantGiven", {"instance": known, "device": "dev1"}),
        ("InstanceDirected", {"instance": known, "rung": Rung.UP}), ("RequestQueued", {"code": "climbing"}),
    )  # fmt: skip
    assert [held_bytes(story.fleet, story.fleet.instances[known], device) for device in ("dev0", "dev1")] == [
        0,
        SIZE + SKELETON,
    ]
    story.report_up("a").then("InstanceUp", ("RequestRouted", {"request": "req_1"}))
    assert story.instance_of("a").device == "dev1"


def test_one_that_holds_a_gpu_is_taken_off_it_and_all_who_come_meanwhile_wait_for_it() -> None:
    story = asleep(gpu=True)
    known, created = sleeper(story), len(story.find(InstanceCreated))
    story.when(admit("req_1", "a")).then(
        "RequestAccepted", ("InstanceDirected", {"instance": known, "rung": Rung.CHECKPOINT, "code": "fetched"}),
        ("RequestQueued", {"code": "descending"}),
    )  # fmt: skip
    assert held_bytes(story.fleet, story.fleet.instances[known], "dev0") == SKELETON, "it is there until it is not"
    story.when(admit("req_2", "a")).then("RequestAccepted", ("RequestQueued", {"code": "descending"}))
    story.report_checkpointed(known).then(
        "InstanceCheckpointed", ("GrantGiven", {"instance": known, "device": "dev1"}),
        ("InstanceDirected", {"instance": known, "rung": Rung.UP}), ("RequestQueued", {"code": "climbing"}),
        ("RequestQueued", {"code": "climbing"}),
    )  # fmt: skip
    story.report_up("a").then("InstanceUp", ("RequestRouted", {"request": "req_1"}), ("RequestRouted", {"request": "req_2"}))
    assert len(story.find(InstanceCreated)) == created


def test_its_place_is_kept_until_it_is_there() -> None:
    story = asleep(gpu=True).given(admit("req_1", "a"))
    story.when(admit("req_2", "c"), after_ms=60_000).then("RequestAccepted", "RequestQueued")
    assert not [g for g in story.fleet.grants.values() if g.device == "dev1"]
    story.report_checkpointed(sleeper(story))
    assert story.instance_of("a").device == "dev1"


def test_what_it_waits_for_is_said() -> None:
    story = asleep(gpu=True).when(admit("req_1", "a"))
    message = story.find(RequestQueued)[-1].reason
    assert message == "a is asleep on gpu0, and is taken off it to be brought to another device"


def test_where_it_slept_is_free_again_before_it_has_left_so_it_comes_back_there() -> None:
    story = asleep(gpu=True).given(admit("req_1", "a"))
    known = sleeper(story)
    story.given(done("req_b"))
    end(story, "b")
    story.report_checkpointed(known).then(
        "InstanceCheckpointed", ("GrantGiven", {"instance": known, "device": "dev0"}), "InstanceDirected", "RequestQueued"
    )


def test_from_an_image_a_new_one_is_as_quick_and_both_devices_have_one_then() -> None:
    story = asleep(gpu=True)
    facts = story.fleet.models["a"].facts
    assert facts is not None
    story.given(
        ReportImageBuilt(
            node="n1", image="img_a", configuration=facts.configuration, size_bytes=5, took_ms=1, proof="same_tokens",
            fingerprint={},
        )
    )  # fmt: skip
    story.when(admit("req_1", "a")).then(
        "RequestAccepted", "InstanceCreated", ("GrantGiven", {"device": "dev1"}), "InstanceDirected", "RequestQueued"
    )


def test_one_that_could_not_leave_for_want_of_memory_is_not_asked_again() -> None:
    story = asleep(gpu=True).given(admit("req_1", "a"))
    known = sleeper(story)
    number, _ = story.directive(known)
    story.when(
        ReportSlept(
            node="n1", instance=known, directive=number, pid=1, took_ms=1, bytes_used=SKELETON, code="no_memory", message="full"
        )
    )  # fmt: skip
    story.then(
        ("InstanceDirected", {"rung": Rung.SLEEP, "code": "no_memory"}), "InstanceSlept", "InstanceCreated",
        ("GrantGiven", {"device": "dev1"}), "InstanceDirected", "RequestQueued",
    )  # fmt: skip


def test_one_that_fails_on_its_way_is_followed_by_another() -> None:
    story = asleep(gpu=True).given(admit("req_1", "a"))
    fail(story, sleeper(story), "cuda_failed")
    assert story.code_of("req_1") == "climbing"


def test_a_gpu_that_nothing_can_be_taken_off_keeps_its_skeletons() -> None:
    story = asleep(gpu=True)
    name = story.fleet.instances[sleeper(story)].configuration
    known = replace(story.fleet.configurations[name], engine="vllm")
    node = replace(story.fleet.nodes["n1"], no_checkpoint="its driver is too old")
    fleet = replace(
        story.fleet, configurations=story.fleet.configurations.set(name, known), nodes=story.fleet.nodes.set("n1", node)
    )
    model = replace(fleet.models["a"], spec=replace(fleet.models["a"].spec, engine="vllm"))
    found = plan(fleet, model, Board())
    assert found is not None
    assert (found.instance, found.fetched, found.slot.device) == (None, None, "dev1")
    able = replace(fleet, nodes=fleet.nodes.set("n1", replace(node, no_checkpoint="")))
    again = plan(able, model, Board())
    assert again is not None and again.fetched == sleeper(story)
