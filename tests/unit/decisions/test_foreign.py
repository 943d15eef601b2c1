"""C16, the plane's part: memory of a device that processes of others have is no place for anybody, as long as they have it."""

from msgspec.structs import replace

from controlplane.commands import Load, Move, ReportForeign, Save, Sleep, Tick
from controlplane.decisions.limits import QUEUE_DEADLINE_MS
from controlplane.decisions.needs import wanted
from controlplane.events import Outsider, RequestFailed
from controlplane.refusal import Code
from controlplane.rungs import Rung
from tests.unit.decisions.spec import Story, hello, plane, spec, with_models
from tests.unit.decisions.test_schedule import CLIMB, admit

OTHER = Outsider(pid=4711, size_bytes=300, name="python")


def strangers(*processes: Outsider, device: str = "dev0") -> ReportForeign:
    return ReportForeign(node="n1", device=device, processes=processes)


def reason(story: Story, request: str) -> str:
    return story.fleet.requests[request].reason


def test_what_does_not_fit_beside_others_waits_with_both_numbers_and_starts_when_they_have_gone() -> None:
    story = with_models(plane(), spec("a", size=600)).when(strangers(OTHER)).then("ForeignMemoryFound")
    story.when(admit("req_1", "a")).then("RequestAccepted", ("RequestQueued", {"code": "foreign_memory"}))
    said = reason(story, "req_1")
    assert "needs 600 B of cpu0" in said and "500 B of its 800 B are left" in said and "pid 4711 (python) has 300 B" in said
    story.when(Tick(), after_ms=1000).then_nothing()
    story.when(strangers()).then("ForeignMemoryGone", *CLIMB, ("RequestQueued", {"code": "climbing"}))
    story.report_up("a")
    assert story.fleet.requests["req_1"].instance


def test_it_starts_as_soon_as_they_leave_enough() -> None:
    story = with_models(plane(), spec("a", size=600)).given(strangers(OTHER)).given(admit("req_1", "a"))
    less = Outsider(pid=4711, size_bytes=200)
    story.when(strangers(less)).then("ForeignMemoryFound", *CLIMB, ("RequestQueued", {"code": "climbing"}))


def test_a_report_that_says_nothing_new_changes_nothing_in_whatever_order() -> None:
    more = Outsider(pid=12, size_bytes=400)
    story = plane().when(strangers(OTHER, more)).then(("ForeignMemoryFound", {"processes": (more, OTHER)}))
    story.when(strangers(more, OTHER)).then_nothing()
    assert story.fleet.devices["dev0"].usable_bytes == 100
    story.when(hello(incarnation="inc_2")).then("NodeJoined")
    assert story.fleet.devices["dev0"].foreign_bytes == 700, "a worker's restart makes nobody's memory free"
    story.when(strangers()).then("ForeignMemoryGone")
    story.when(strangers()).then_nothing()


def test_a_device_that_nobody_knows_is_refused() -> None:
    plane().when(strangers(OTHER, device="dev9")).then_refused(Code.STALE)


def test_the_device_with_room_is_taken_though_the_other_fits_better_by_cells() -> None:
    """a holds half of cpu0; beside it and the stranger b's half is no use, and a is not sent away for it."""
    story = with_models(plane(devices=2), spec("a", size=400), spec("b", size=400)).bring_up("a")
    assert story.instance_of("a").device == "dev0"
    story.given(strangers(OTHER)).when(Load(model="b"))
    assert story.instance_of("b").device == "dev1"


def test_who_is_idle_leaves_for_it_where_that_makes_enough_room() -> None:
    story = with_models(plane(), spec("a", size=400), spec("b", size=400)).bring_up("a").given(strangers(OTHER))
    idle = story.instance_of("a").instance
    story.when(admit("req_1", "b"), after_ms=5)
    away = ("InstanceDirected", {"instance": idle, "victim_of": "b"})
    story.then("RequestAccepted", away, ("RequestQueued", {"code": "making_room"}))
    assert "500 B beside memory that is not this plane's: pid 4711 (python) has 300 B" in reason(story, "req_1")
    story.report_slept(idle)
    assert story.instance_of("b").device == "dev0"


def test_an_idle_one_leaves_elsewhere_before_a_busy_one_beside_others_is_waited_for() -> None:
    story = with_models(plane(devices=2), spec("a", size=400), spec("b", size=400), spec("c", size=800))
    story.bring_up("a").bring_up("c").given(admit("req_1", "a")).given(strangers(OTHER))
    idle = story.instance_of("c")
    assert (story.instance_of("a").device, idle.device) == ("dev0", "dev1")
    story.when(admit("req_2", "b"), after_ms=5).then(
        "RequestAccepted", ("InstanceDirected", {"instance": idle.instance, "victim_of": "b"}), "RequestQueued"
    )
    story.report_slept(idle.instance)
    assert story.instance_of("b").device == "dev1"


def test_nobody_leaves_beside_one_who_stays_and_leaves_no_room() -> None:
    """a is idle, but b, which runs, and the stranger have too much even without it."""
    story = with_models(plane(), spec("a", size=400), spec("b", size=200), spec("c", size=400)).bring_up("a").bring_up("b")
    story.given(admit("req_1", "b")).given(strangers(OTHER))
    story.when(admit("req_2", "c"), after_ms=5).then("RequestAccepted", ("RequestQueued", {"code": "slot_busy"}))
    assert "b serves requests" in reason(story, "req_2")
    story.when(strangers(Outsider(pid=4711, size_bytes=200)))
    assert story.directive(story.instance_of("a").instance)[1].victim_of == "c", "now that is enough"


def test_nobody_leaves_for_what_would_not_fit_then_either() -> None:
    story = with_models(plane(), spec("a", size=400), spec("b", size=600)).bring_up("a").given(strangers(OTHER))
    story.when(admit("req_1", "b"), after_ms=5).then("RequestAccepted", ("RequestQueued", {"code": "foreign_memory"}))
    story.when(admit("req_2", "a")).then("RequestAccepted", "RequestRouted")


def test_a_sleeper_is_not_woken_into_it_and_another_device_serves_meanwhile() -> None:
    story = with_models(plane(devices=2), spec("a", size=600)).bring_up("a")
    sleeper = story.instance_of("a")
    story.when(Sleep(model="a")).report_slept(sleeper.instance)
    story.given(strangers(OTHER)).when(admit("req_1", "a"))
    (other,) = [i for i in story.fleet.instances.values() if i.instance != sleeper.instance]
    assert (other.device, story.code_of("req_1")) == ("dev1", "climbing")


def test_who_will_not_wait_hears_the_reason_at_once() -> None:
    story = with_models(plane(), spec("a", size=600)).given(strangers(OTHER))
    story.when(replace(admit("req_1", "a"), wait=False)).then_refused(Code.BUSY)
    assert story.refused is not None
    assert "pid 4711 (python) has 300 B" in story.refused.message and story.refused.retry_after_ms
    assert not story.fleet.requests


def test_who_has_waited_long_enough_is_told_why() -> None:
    story = with_models(plane(), spec("a", size=600)).given(strangers(OTHER)).given(admit("req_1", "a"))
    story.when(Tick(), after_ms=QUEUE_DEADLINE_MS)
    (failed,) = story.find(RequestFailed)
    assert failed.code == "queue_timeout" and "pid 4711" in failed.message


def test_a_move_into_it_is_refused_with_both_numbers() -> None:
    story = with_models(plane(devices=2), spec("a", size=600)).bring_up("a").given(strangers(OTHER, device="dev1"))
    story.when(Move(what="a", device="cpu1")).then_refused(Code.NO_ROOM, need_bytes=600, limit_bytes=500)
    assert story.refused is not None and "pid 4711 (python) has 300 B" in story.refused.message


def test_a_gang_takes_the_devices_that_are_its_own() -> None:
    story = with_models(plane(devices=3, kind="gpu"), spec("g", size=1200, gpus=2, gpu=True)).given(strangers(OTHER))
    story.when(Load(model="g"))
    assert set(story.instance_of("g").devices) == {"dev1", "dev2"}


def test_a_gang_that_waits_is_told_of_the_device_that_it_does_not_fit_on() -> None:
    story = with_models(plane(devices=2, kind="gpu"), spec("g", size=1200, gpus=2, gpu=True))
    story.given(strangers(Outsider(pid=7, size_bytes=10), device="dev1")).given(strangers(OTHER))
    story.when(admit("req_1", "g")).then("RequestAccepted", ("RequestQueued", {"code": "foreign_memory"}))
    assert "500 B of its 800 B are left" in reason(story, "req_1") and "pid 4711" in reason(story, "req_1")


def test_no_place_for_the_proof_of_an_image_is_given_in_it() -> None:
    """Nor is b sent away for it, which is idle, as long as that would not help."""
    story = with_models(plane(), spec("a", size=600), spec("b", size=100)).bring_up("a").given(Sleep(model="a"))
    name = story.instance_of("a").instance
    story.report_slept(name, bytes_used=50).bring_up("b").given(strangers(OTHER))
    story.when(Save(model="a")).then("OperationRequested")
    story.when(Tick()).then_nothing()
    story.given(strangers()).when(Tick()).then(("InstanceDirected", {"victim_of": "a", "rung": Rung.SLEEP}))
    story.report_slept(story.instance_of("b").instance)
    assert story.directive(name)[1].rung is Rung.SAVED


def test_what_nobody_has_measured_yet_assumes_no_more_than_others_leave() -> None:
    story = with_models(plane(kind="gpu"), spec("a", size=400, gpu=True)).given(strangers(OTHER))
    assert wanted(story.fleet, story.fleet.models["a"]) == {"dev0": 4}


def test_who_waits_is_told_other_numbers_but_not_each_second() -> None:
    story = with_models(plane(), spec("a", size=600)).given(strangers(OTHER)).given(admit("req_1", "a"))
    story.when(strangers(replace(OTHER, pid=12, size_bytes=400)), after_ms=2_000).then("ForeignMemoryFound")
    assert "pid 4711" in reason(story, "req_1"), "it was told two seconds ago"
    renewed = ("RequestQueued", {"code": "foreign_memory"})
    story.when(Tick(), after_ms=8_000).then(renewed)
    said = reason(story, "req_1")
    assert "400 B of its 800 B are left" in said and "pid 12 (python) has 400 B" in said and "4711" not in said
    story.when(strangers(replace(OTHER, pid=12, size_bytes=500)), after_ms=20_000).then("ForeignMemoryFound", renewed)
    story.when(Tick(), after_ms=20_000).then_nothing()
