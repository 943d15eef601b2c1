"""Gangs: several whole devices of one node, all of them or none."""

from msgspec.structs import replace

from controlplane.commands import (
    Checkpoint,
    DeviceFound,
    Load,
    RegisterModel,
    ReportFailed,
    Save,
    Sleep,
    Tick,
)
from controlplane.decisions import hostroom
from controlplane.decisions.needs import held_bytes
from controlplane.events import GrantGiven, GrantReturned, InstanceDirected
from controlplane.refusal import Code
from controlplane.rungs import NOT_CHECKPOINTABLE, Rung
from controlplane.spec import Idle, ModelSpec
from tests.unit.decisions.spec import DEVICE, Story, hello, plane, spec, with_models
from tests.unit.decisions.test_admission import admit, done

QUARTER = DEVICE // 4


def pair(name: str = "pair", gpus: int = 2) -> ModelSpec:
    return replace(spec(name, size=gpus * DEVICE), gpus=gpus)


def held(story: Story) -> list[tuple[str, int, int]]:
    return sorted((g.device, g.offset, g.cells) for g in story.fleet.grants.values())


def test_one_decision_gives_every_rank_its_device() -> None:
    story = with_models(plane(devices=2), pair())
    story.when(Load(model="pair")).then(
        "OperationRequested", "InstanceCreated", ("GrantGiven", {"rank": 0, "gang": 0}), ("GrantGiven", {"rank": 1}),
        ("InstanceDirected", {"rung": Rung.UP}),
    )  # fmt: skip
    first, second = (n for n in sorted(story.fleet.grants))
    directed = story.find(InstanceDirected)[-1]
    assert (directed.grant, directed.gang) == (first, (first, second))
    assert story.find(GrantGiven)[1].gang == first
    instance = story.report_up("pair").instance_of("pair")
    assert (instance.devices, instance.grants) == (("dev0", "dev1"), (first, second))


def test_it_gives_all_of_them_back() -> None:
    story = with_models(plane(devices=2), pair()).bring_up("pair")
    instance = story.instance_of("pair").instance
    number, _ = story.directive(instance)
    story.when(
        ReportFailed(
            node="n1", instance=instance, directive=number, rung=Rung.UP, step="serve", code="engine_died", message="rank 1"
        )
    ).then("InstanceFailed", "GrantReturned", "GrantReturned")  # fmt: skip
    assert not story.fleet.grants


def test_a_sleeping_gang_wakes_on_its_own_devices() -> None:
    story = with_models(plane(devices=3), pair(), spec("one")).bring_up("pair")
    gang = story.instance_of("pair").instance
    story.when(Load(model="one")).report_up("one")
    story.when(Sleep(model="pair")).report_slept(gang)
    assert len(story.find(GrantReturned)) == 2
    story.when(Load(model="pair"))
    assert story.find(InstanceDirected)[-1].instance == gang
    assert [d for d, _, _ in held(story)] == ["dev0", "dev1", "dev2"]


def test_room_is_made_on_every_device_at_once_and_nobody_leaves_for_a_half() -> None:
    story = with_models(plane(devices=2), spec("a"), spec("b"), pair()).bring_up("a").bring_up("b")
    story.given(admit("req_a", "a"))
    story.when(admit("req_p", "pair"), after_ms=10).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    story.when(done("req_a"), after_ms=10)
    assert [e.victim_of for e in story.find(InstanceDirected)[-2:]] == ["pair", "pair"]
    for name in "ab":
        story.report_slept(story.instance_of(name).instance)
    assert len(story.fleet.grants) == 2
    assert story.code_of("req_p") == "climbing"


def test_two_gangs_of_four_on_six_devices_are_served_one_after_the_other() -> None:
    story = with_models(plane(devices=6, pool_bytes=100_000), pair("x", 4), pair("y", 4))
    story.when(admit("req_x", "x")).report_up("x")
    story.when(admit("req_y", "y"), after_ms=10).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    assert len(story.fleet.grants) == 4, "none is held half-way"
    story.when(done("req_x"), after_ms=10).report_slept(story.instance_of("x").instance)
    assert story.instance_of("y").directive.rung is Rung.UP  # type: ignore[union-attr]
    assert len(story.fleet.grants) == 4
    story.report_up("y").when(done("req_y"), after_ms=10)
    assert not story.fleet.requests


def test_devices_that_reach_one_another_directly_come_first() -> None:
    found = tuple(
        DeviceFound(f"dev{n}", f"gpu{n}", "cpu", DEVICE, island) for n, island in enumerate(("a", "b", "a", "b", "b"))
    )
    story = with_models(plane().given(replace(hello(), devices=found, incarnation="inc_2")), spec("one"), pair())
    story.bring_up("one")  # on gpu0: of island a only gpu2 is left
    story.bring_up("pair")
    assert story.instance_of("pair").devices == ("dev1", "dev3")


def test_what_no_node_has_devices_enough_for_is_refused_with_both_numbers() -> None:
    story = plane(devices=2)
    story.when(RegisterModel(spec=pair(gpus=4))).then_refused(Code.CANNOT_FIT, need_bytes=4, limit_bytes=2)


def test_the_ledger_has_a_line_on_each_device() -> None:
    story = with_models(plane(devices=2), pair()).when(Load(model="pair"))
    assert [held_bytes(story.fleet, story.instance_of("pair"), d) for d in ("dev0", "dev1")] == [DEVICE, DEVICE]
    story.report_up("pair")
    assert [held_bytes(story.fleet, story.instance_of("pair"), d) for d in ("dev0", "dev1")] == [DEVICE, DEVICE]


def test_a_small_model_evicts_a_whole_gang() -> None:
    story = with_models(plane(devices=2), pair(), spec("one")).bring_up("pair")
    story.when(admit("req_1", "one"), after_ms=10)
    story.report_slept(story.instance_of("pair").instance)
    assert [d for d, _, _ in held(story)] == ["dev0"]


def checkpointable(name: str = "pair") -> ModelSpec:
    """A pair whose ranks can leave their devices, with a skeleton of a quarter of a device on each."""
    weights = 2 * DEVICE - 2 * QUARTER
    arguments = {"weight_bytes": weights, "skeleton_bytes": QUARTER, "gpu": True, "gang_checkpoint": True}
    return replace(pair(name), arguments=arguments)


def test_a_gang_is_taken_off_its_devices_only_if_its_model_says_so() -> None:
    card = replace(pair(), arguments={**pair().arguments, "gpu": True})
    story = with_models(plane(devices=2), card).bring_up("pair")
    story.when(Checkpoint(model="pair")).then_refused(Code.NOT_AVAILABLE, reason="no_cuda")
    assert story.refused is not None and "arguments.gang_checkpoint" in story.refused.message


def test_a_gang_at_checkpoint_comes_back_where_it_was_or_not_at_all() -> None:
    story = with_models(plane(devices=3), checkpointable(), spec("one")).bring_up("pair")
    gang = story.instance_of("pair").instance
    assert story.instance_of("pair").devices == ("dev0", "dev1")
    story.when(Checkpoint(model="pair")).report_checkpointed(gang)
    assert not story.fleet.grants
    story.bring_up("one").given(admit("req_1", "one"))
    (busy,) = {grant.device for grant in story.fleet.grants.values()}
    assert busy == "dev0"
    story.when(admit("req_p", "pair"), after_ms=10)
    climbing = story.fleet.instances[story.find(InstanceDirected)[-1].instance]
    assert climbing.instance != gang and climbing.devices == ("dev1", "dev2"), "a cold start, for it does not move"
    assert story.fleet.instances[gang].rung is Rung.CHECKPOINT


def test_a_gang_at_checkpoint_is_woken_before_another_is_started() -> None:
    story = with_models(plane(devices=4), checkpointable()).bring_up("pair")
    gang = story.instance_of("pair").instance
    story.when(Checkpoint(model="pair")).report_checkpointed(gang).when(Load(model="pair"))
    directed = story.find(InstanceDirected)[-1]
    assert (directed.instance, len(directed.gang)) == (gang, 2)
    assert held(story) == [("dev0", 0, 8), ("dev1", 0, 8)]


def test_a_sleeping_gang_whose_bytes_are_wanted_leaves_its_devices_and_is_promised_the_hosts_memory_for_all_its_ranks() -> None:
    story = with_models(plane(devices=2), checkpointable(), spec("one")).bring_up("pair")
    gang = story.instance_of("pair").instance
    story.when(Sleep(model="pair")).report_slept(gang, bytes_used=2 * QUARTER)
    assert story.fleet.configurations[story.fleet.instances[gang].configuration].skeleton_bytes == QUARTER
    assert hostroom.need_bytes(story.fleet, story.fleet.instances[gang]) == 2 * QUARTER
    story.when(Load(model="one"))
    assert story.find(InstanceDirected)[-1].rung is Rung.CHECKPOINT
    story.report_checkpointed(gang).report_up("one")
    assert [d for d, _, _ in held(story)] == ["dev0"]


def test_a_gang_that_could_not_let_go_is_not_asked_again_before_it_was_used_and_ends_after_its_own_time() -> None:
    model = replace(checkpointable(), idle=Idle(sleep_ms=1_000, checkpoint_ms=2_000, cold_ms=300_000))
    story = with_models(plane(devices=2), model).bring_up("pair")
    gang = story.instance_of("pair").instance
    story.when(Sleep(model="pair")).report_slept(gang, bytes_used=2 * QUARTER)
    story.when(Tick(), after_ms=3_000)
    assert story.find(InstanceDirected)[-1].rung is Rung.CHECKPOINT
    stayed = replace(story.slept_report(gang, bytes_used=2 * QUARTER), code=NOT_CHECKPOINTABLE, message="it shares a file")
    story.when(stayed, after_ms=10)
    assert story.fleet.instances[gang].rung is Rung.SLEEP
    story.when(Checkpoint(model="pair")).then_refused(Code.NOT_AVAILABLE, reason="no_cuda")
    for _ in range(29):
        story.when(Tick(), after_ms=10_000)
    assert story.find(InstanceDirected)[-1].code == NOT_CHECKPOINTABLE, "told nothing else since"
    story.when(Tick(), after_ms=10_000)
    assert (story.find(InstanceDirected)[-1].rung, story.find(InstanceDirected)[-1].code) == (Rung.COLD, "idle")


def test_a_gang_that_could_not_let_go_ends_where_its_bytes_are_wanted_and_may_be_asked_again_once_it_was_used() -> None:
    story = with_models(plane(devices=2), checkpointable(), spec("one")).bring_up("pair")
    gang = story.instance_of("pair").instance
    story.when(Checkpoint(model="pair"))
    story.when(replace(story.slept_report(gang, bytes_used=2 * QUARTER), code=NOT_CHECKPOINTABLE, message="it shares a file"))
    story.bring_up("pair").when(Checkpoint(model="pair"))
    assert story.refused is None and story.find(InstanceDirected)[-1].rung is Rung.CHECKPOINT
    story.when(replace(story.slept_report(gang, bytes_used=2 * QUARTER), code=NOT_CHECKPOINTABLE, message="it shares a file"))
    story.when(Load(model="one"))
    assert (story.find(InstanceDirected)[-1].instance, story.find(InstanceDirected)[-1].rung) == (gang, Rung.COLD)


def test_a_gang_is_not_saved_to_disk() -> None:
    story = with_models(plane(devices=2), pair()).bring_up("pair")
    story.when(Save(model="pair")).then_refused(Code.NOT_AVAILABLE)
    story.when(Tick(), after_ms=10).then_nothing()
