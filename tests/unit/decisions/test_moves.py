"""Moves: a live instance goes to another device; who comes meanwhile waits, nobody is lost."""

from msgspec.structs import replace

from controlplane.commands import DeviceFound, Hello, Move, ReportEnded, ReportFailed, ReportSlept, Sleep, Stop
from controlplane.decisions.needs import held_bytes
from controlplane.events import GrantReturned, OperationFailed, OperationSucceeded, RequestRouted
from controlplane.refusal import Code
from controlplane.rungs import Rung
from tests.unit.decisions.spec import DEVICE, Story, plane, spec, with_models
from tests.unit.decisions.test_admission import admit, done

HALF = DEVICE // 2


def up(devices: int = 2, size: int = DEVICE) -> Story:
    return with_models(plane(devices=devices), spec("a", size=size), spec("b", size=size)).bring_up("a")


def test_the_target_is_granted_first_and_the_source_returned_when_it_serves_there() -> None:
    story = up()
    source = story.instance_of("a").grant
    story.when(Move(what="a", device="cpu1")).then(
        ("OperationRequested", {"kind": "move", "device": "dev1"}), ("GrantGiven", {"device": "dev1"}),
        ("InstanceDirected", {"rung": Rung.UP, "code": "move", "model": "a"}),
    )  # fmt: skip
    assert len(story.fleet.grants) == 2
    story.report_up("a").then("InstanceUp", ("GrantReturned", {"grant": source, "device": "dev0"}), "OperationSucceeded")
    instance = story.instance_of("a")
    assert (instance.device, instance.moving_to, list(story.fleet.grants)) == ("dev1", None, [instance.grant])
    assert story.find(OperationSucceeded)[-1].note == "serves on cpu1"


def test_requests_that_arrive_meanwhile_wait_and_are_served_there() -> None:
    story = up().given(admit("req_1", "a")).given(Move(what="a", device="cpu1"))
    moves = {"code": "climbing", "reason": "a moves from cpu0 to cpu1"}
    story.when(admit("req_2", "a")).then("RequestAccepted", ("RequestQueued", moves))
    story.given(done("req_1")).report_up("a")
    routed = story.find(RequestRouted)[-1]
    assert (routed.request, routed.grant) == ("req_2", story.instance_of("a").grant)


def test_the_ledger_counts_it_on_both_devices_while_it_moves() -> None:
    story = up().given(Move(what="a", device="cpu1"))
    instance = story.instance_of("a")
    assert [held_bytes(story.fleet, instance, d) for d in ("dev0", "dev1")] == [DEVICE, DEVICE]
    story.report_up("a")
    assert [held_bytes(story.fleet, story.instance_of("a"), d) for d in ("dev0", "dev1")] == [0, DEVICE]


def test_a_move_that_fails_gives_both_places_back_and_waiters_are_served_by_another() -> None:
    story = up().given(Move(what="a", device="cpu1")).given(admit("req_1", "a"))
    instance = story.instance_of("a").instance
    number, _ = story.directive(instance)
    story.when(
        ReportFailed(
            node="n1", instance=instance, directive=number, rung=Rung.UP, step="restore", code="restore_failed", message="no"
        )
    )  # fmt: skip
    assert len(story.find(GrantReturned)) == 2
    assert not story.fleet.grants
    assert story.find(OperationFailed)[-1].code == "restore_failed"
    assert story.code_of("req_1") == "backing_off"


def test_one_that_sleeps_instead_has_not_moved() -> None:
    story = up().given(Move(what="a", device="cpu1"))
    instance = story.instance_of("a").instance
    number, _ = story.directive(instance)
    story.when(
        ReportSlept(
            node="n1", instance=instance, directive=number, pid=1, took_ms=1, bytes_used=1, code="no_room", message="full"
        )
    )  # fmt: skip
    assert story.find(OperationFailed)[-1].code == "no_room"
    assert not story.fleet.grants


def test_it_can_be_stopped_on_its_way() -> None:
    story = up().given(Move(what="a", device="cpu1")).when(Stop(model="a"))
    assert story.find(OperationFailed)[-1].code == "superseded"
    number, _ = story.directive(story.instance_of("a").instance)
    story.when(ReportEnded(node="n1", instance=story.instance_of("a").instance, directive=number, took_ms=1))
    assert not story.fleet.grants


def test_a_sleep_waits_until_it_has_arrived() -> None:
    story = up().given(Move(what="a", device="cpu1")).when(Sleep(model="a"))
    story.report_up("a")
    assert story.instance_of("a").directive.rung is Rung.SLEEP  # type: ignore[union-attr]


def test_what_cannot_move_is_refused_by_name() -> None:
    story = up(size=HALF)
    story.when(Move(what="a", device="nowhere")).then_refused(Code.DEVICE_UNKNOWN)
    story.when(Move(what="a", device="cpu0")).then_refused(Code.ALREADY_THERE)
    story.when(Move(what="b", device="cpu1")).then_refused(Code.NOT_UP)
    story.when(Move(what="nobody", device="cpu1")).then_refused(Code.MODEL_UNKNOWN)
    story.given(Move(what="a", device="cpu1"))
    story.when(Move(what="a", device="cpu1")).then_refused(Code.BUSY)


def test_a_device_without_room_is_refused_with_both_numbers_and_nobody_is_sent_away() -> None:
    story = up().bring_up("b")
    story.when(Move(what="a", device="cpu1")).then_refused(Code.NO_ROOM, need_cells=8, free_cells=0)
    story.given(Sleep(model="b")).report_slept(story.instance_of("b").instance, bytes_used=HALF)
    story.when(Move(what="a", device="cpu1")).then_refused(Code.NO_ROOM, need_bytes=DEVICE, limit_bytes=HALF)


def test_moves_stay_on_a_node() -> None:
    story = up().given(
        Hello(
            node="n2", address="10.0.0.2", incarnation="inc_9", boot="boot", pool_budget_bytes=10_000,
            devices=(DeviceFound("far", "far0", "cpu", DEVICE),),
        )
    )  # fmt: skip
    story.when(Move(what="a", device="far0")).then_refused(Code.NOT_AVAILABLE)


def test_a_gang_does_not_move() -> None:
    story = with_models(plane(devices=3), replace(spec("pair", size=2 * DEVICE), gpus=2)).bring_up("pair")
    story.when(Move(what="pair", device="cpu2")).then_refused(Code.NOT_AVAILABLE)
