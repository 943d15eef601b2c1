"""Deaths at every moment: what is lost, what is reported, what is left."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from immutables import Map
from msgspec.structs import replace

from controlplane.answer import Queued, Routed
from controlplane.commands import Load, Retry, Sleep, Stop
from controlplane.events import (
    GrantReturned,
    InstanceCreated,
    InstanceEnded,
    InstanceFailed,
    InstanceSlept,
    InstanceUp,
    ModelSetBack,
    RequestRouted,
)
from controlplane.fleet import Instance
from controlplane.quantities import human_bytes
from controlplane.rungs import Rung
from pool.place import place
from tests.poolroom import DEADLINE_S, remove
from tests.workshop import DEVICE, MIB, Plant
from worker import processes
from worker.holderlink import HolderLink
from worker.holdermessages import Held
from worker.processes import Process


async def kill(process: Process | None) -> None:
    assert process is not None
    assert processes.send(process, signal.SIGKILL)


def engine(plane: Plant) -> Process | None:
    """The engine of the only instance, once it has been started."""
    instance = plane.only()
    record = plane.directory(instance.instance).read() if instance else None
    return record.engine if record else None


async def failure(plane: Plant) -> InstanceFailed:
    await plane.until(lambda: plane.of_type(InstanceFailed))
    return plane.of_type(InstanceFailed)[-1]


def nothing_left(plane: Plant) -> None:
    assert plane.processes() == []
    assert list((plane.data / "run" / "inst").iterdir()) == []
    assert plane.worker.locks.holder(DEVICE, 0) is None


async def test_an_engine_killed_at_its_start_is_reported_with_its_log(plane: Plant) -> None:
    await plane.register("a", load_ms=60_000)
    plane.order(Load(model="a"))
    await kill(await plane.until(lambda: engine(plane)))
    failed = await failure(plane)
    assert failed.code == "start_failed"
    nothing_left(plane)
    assert plane.of_type(ModelSetBack)


async def test_a_start_that_fails_says_what_the_engine_said_and_the_next_one_is_fine(plane: Plant) -> None:
    await plane.register("a", fail="start:1")
    plane.order(Load(model="a"))
    failed = await failure(plane)
    assert failed.code == "start_failed"
    assert "told to fail at the start" in failed.message
    plane.order(Retry(model="a"))
    await plane.load("a")


async def test_an_engine_killed_in_its_wake_is_cleaned_up(plane: Plant) -> None:
    await plane.register("a", wake_ms=60_000)
    plane.order(Load(model="a"))
    await plane.until(lambda: plane.only() and plane.worker.locks.holder(DEVICE, 0))
    await plane.until(lambda: any(shown.step == "wake" for shown in plane.worker.site.board.shown))
    await kill(engine(plane))
    failed = await failure(plane)
    assert (failed.code, failed.step) == ("engine_died", "wake")
    nothing_left(plane)


async def test_an_engine_killed_while_serving_gives_its_callers_a_typed_end(plane: Plant) -> None:
    await plane.register("a", tokens_per_s=5)
    up = await plane.load("a")
    lines = []
    async for line in plane.stream(up, "req_1", "x" * 50):
        lines.append(line)
        if len(lines) == 3:
            await kill(plane.record(up.instance).engine)
    assert (lines[-1]["t"], lines[-1]["code"]) == ("error", "engine_died")
    failed = await failure(plane)
    assert (failed.code, failed.rung) == ("engine_died", Rung.UP)
    assert plane.of_type(GrantReturned)
    nothing_left(plane)


async def test_a_holder_killed_while_serving_takes_all_with_it(plane: Plant) -> None:
    await plane.register("a")
    up = await plane.load("a")
    await kill(plane.record(up.instance).holder)
    assert (await failure(plane)).code == "holder_died"
    nothing_left(plane)


async def test_a_holder_killed_while_climbing_takes_all_with_it(plane: Plant) -> None:
    await plane.register("a", load_ms=60_000)
    plane.order(Load(model="a"))
    await plane.until(lambda: engine(plane))
    await kill(plane.record(plane.only().instance).holder)
    assert (await failure(plane)).code in ("holder_died", "start_failed")
    nothing_left(plane)


async def test_a_frontend_is_started_again_on_its_port_and_loses_nothing(plane: Plant) -> None:
    await plane.register("a", tokens_per_s=50)
    up = await plane.load("a")
    before = plane.record(up.instance)
    await kill(before.frontend)
    await plane.until(lambda: (now := plane.record(up.instance)).frontend != before.frontend and now.frontend)
    keeper = plane.worker.reconciler.keepers[up.instance]
    await plane.until(lambda: keeper.local.seen.serving)
    after = plane.record(up.instance)
    assert (after.port, after.engine) == (before.port, before.engine)
    lines = await plane.generate(up, "req_1", "hi")
    assert lines[-1]["t"] == "end"
    assert len(plane.of_type(InstanceUp)) == 1
    assert plane.of_type(InstanceFailed) == []


async def test_the_pools_death_stops_nothing_that_is_up_and_staging_waits_for_the_next_daemon(plane: Plant) -> None:
    await plane.register("a")
    await plane.register("b", kv_bytes=MIB)
    up = await plane.load("a")
    await kill(plane.pool)
    assert plane.pool is not None and await processes.gone(plane.pool, DEADLINE_S)
    assert (await plane.generate(up, "req_1", "hi"))[-1]["t"] == "end"
    plane.order(Load(model="b"))
    await plane.until(lambda: any(shown.step == "stage" for shown in plane.worker.site.board.shown))
    await plane.start_pool()
    await plane.until(lambda: plane.up("b"))
    assert plane.up("a")


async def test_a_pool_whose_directory_was_removed_ends_and_models_load_with_the_next_one(plane: Plant) -> None:
    await plane.register("a")
    await plane.register("b", kv_bytes=MIB)
    up = await plane.load("a")
    segments = place(Path(plane.plane.pool_socket).parent / "segments", plane.plane.pool_bytes)
    await asyncio.to_thread(remove, segments)
    plane.order(Load(model="b"))
    assert plane.pool is not None and await processes.gone(plane.pool, DEADLINE_S)
    assert (await plane.generate(up, "req_1", "hi"))[-1]["t"] == "end"
    await plane.until(lambda: any(shown.step == "stage" for shown in plane.worker.site.board.shown))
    await plane.start_pool()
    await plane.until(lambda: plane.up("b"))
    assert plane.up("a")
    assert plane.of_type(InstanceFailed) == []


async def test_an_engine_that_ignores_the_stop_is_drained_then_aborted_then_ended(plane: Plant) -> None:
    """Eight callers on an engine that never ends by itself: the drain has a deadline, callers get a typed end."""
    await plane.register("a", tokens_per_s=20, ignore_stop=True, max_num_seqs=8)
    up = await plane.load("a")
    callers = [asyncio.create_task(plane.generate(up, f"req_{number}", "x", max_tokens=4000)) for number in range(8)]
    keeper = plane.worker.reconciler.keepers[up.instance]
    async with asyncio.timeout(DEADLINE_S):
        while (await keeper.local.frontend.status(plane.record(up.instance).port)).running < 8:
            await asyncio.sleep(0.02)
    plane.order(Stop(model="a"))
    for lines in await asyncio.gather(*callers):
        assert (lines[-1]["t"], lines[-1]["code"]) == ("error", "aborted")
    await plane.until(lambda: plane.of_type(InstanceEnded))
    nothing_left(plane)


async def test_a_stopped_engine_that_does_not_answer_is_killed(plane: Plant) -> None:
    await plane.register("a")
    up = await plane.load("a")
    stuck = plane.record(up.instance).engine
    assert stuck is not None
    assert processes.send(stuck, signal.SIGSTOP)
    plane.order(Stop(model="a"))
    await plane.until(lambda: plane.of_type(InstanceEnded))
    nothing_left(plane)


async def test_c19_memory_that_an_engine_keeps_asleep_fails_its_descent_and_no_neighbours_wake(plane: Plant) -> None:
    plane.deadlines = replace(plane.deadlines, verify=2.0)
    await plane.restart_worker()
    await plane.register("a", kv_bytes=64 * MIB, keep_fraction=0.5)
    await plane.register("b", kv_bytes=MIB)
    at_fault = await plane.load("a")
    neighbour = await plane.load("b")
    plane.order(Sleep(model="b"))
    await plane.until(lambda: plane.fleet.instances[neighbour.instance].rung is Rung.SLEEP)
    plane.order(Sleep(model="a"))
    plane.order(Load(model="b"))
    failed = await failure(plane)
    assert (failed.instance, failed.code) == (at_fault.instance, "memory_kept")
    assert human_bytes(32 * MIB) in failed.message
    again = await plane.until(lambda: plane.up("b"))
    assert (again.instance, again.pid) == (neighbour.instance, neighbour.pid)
    assert len(plane.of_type(InstanceFailed)) == 1
    record = plane.record(again.instance)
    assert record.holder and record.engine and record.frontend
    assert set(plane.processes()) == {record.holder.pid, record.engine.pid, record.frontend.pid}, "nothing of the other is left"


async def eight_talking(plane: Plant) -> tuple[Instance, list["asyncio.Task[list[dict[str, Any]]]"]]:
    """An engine in the middle of eight answers of some 60 tokens."""
    plane.deadlines = replace(plane.deadlines, drain=20.0)
    await plane.restart_worker()
    await plane.register("a", tokens_per_s=25, max_num_seqs=8, kv_bytes=8 * MIB)
    up = await plane.load("a")
    callers = [asyncio.create_task(plane.generate(up, f"req_{n}", said(n))) for n in range(8)]
    port, frontend = plane.record(up.instance).port, plane.worker.reconciler.keepers[up.instance].local.frontend
    async with asyncio.timeout(DEADLINE_S):
        while (await frontend.status(port)).running < 8:
            await asyncio.sleep(0.02)
    return up, callers


def said(number: int) -> str:
    return f"{number} of eight callers, who all talk at the same time"


async def test_c08_a_sleep_ordered_while_tokens_are_decoded_waits_for_all_of_them(plane: Plant) -> None:
    up, callers = await eight_talking(plane)
    plane.order(Sleep(model="a"))
    for number, lines in enumerate(await asyncio.gather(*callers)):
        assert "".join(line.get("text", "") for line in lines) == f"You said: {said(number)}"
        assert (lines[-1]["t"], lines[-1]["finish_reason"]) == ("end", "stop")
    await plane.until(lambda: plane.fleet.instances[up.instance].rung is Rung.SLEEP)
    (slept,) = plane.of_type(InstanceSlept)
    assert [step.name for step in slept.steps] == ["stop_serving", "drain", "sleep", "detach", "verify", "drop_cells"]
    assert slept.bytes_used < up.bytes_used - 8 * MIB, "its memory was measured, and is back"
    assert (await plane.load("a")).pid == up.pid
    assert plane.of_type(InstanceFailed) == []


async def test_c08_an_engine_that_dies_on_its_way_to_sleep_is_told_with_its_step(plane: Plant) -> None:
    _, callers = await eight_talking(plane)
    plane.order(Sleep(model="a"))
    await plane.until(lambda: any(shown.step == "drain" for shown in plane.worker.site.board.shown))
    await kill(engine(plane))
    for lines in await asyncio.gather(*callers):
        assert (lines[-1]["t"], lines[-1]["code"]) == ("error", "engine_died")
    failed = await failure(plane)
    assert (failed.code, failed.rung, failed.step) == ("engine_died", Rung.UP, "drain")
    assert plane.of_type(GrantReturned)
    assert plane.of_type(InstanceSlept) == []
    nothing_left(plane)


async def test_a_share_that_is_too_small_fails_the_wake_with_both_numbers(plane: Plant) -> None:
    await plane.register("a", skeleton_bytes=2100 * MIB)
    plane.order(Load(model="a"))
    failed = await failure(plane)
    assert failed.code == "no_room"
    assert "its 4 cells have 2.0 GiB" in failed.message


async def test_a_worker_that_comes_back_takes_up_what_serves(plane: Plant) -> None:
    await plane.register("a")
    up = await plane.load("a")
    before = plane.record(up.instance)
    await plane.restart_worker()
    assert plane.worker.reconciler.keepers[up.instance].local.seen.awake
    assert plane.record(up.instance) == before
    assert (await plane.generate(up, "req_1", "hi"))[-1]["t"] == "end"
    claim = plane.worker.locks.holder(DEVICE, 0)
    assert claim is not None
    assert (claim.grant, claim.instance) == (up.grant, up.instance)
    plane.order(Sleep(model="a"))
    await plane.until(lambda: plane.only().rung is Rung.SLEEP)
    again = await plane.load("a")
    assert again.pid == up.pid


async def test_a_worker_that_comes_back_goes_on_with_a_climb(plane: Plant) -> None:
    """One climb, one process: the same directive seen again, by the same worker and by the next one."""
    await plane.register("a", load_ms=2500)
    plane.order(Load(model="a"))
    first = await plane.until(lambda: engine(plane))
    for _ in range(5):
        plane.worker.act()
    await plane.restart_worker()
    for _ in range(5):
        plane.worker.act()
    up = await plane.until(lambda: plane.up("a"))
    assert plane.record(up.instance).engine == first
    assert len(plane.of_type(InstanceCreated)) == 1
    assert plane.of_type(InstanceFailed) == []


async def test_a_worker_that_dies_just_as_its_engine_is_there_has_left_word_of_what_that_is(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, begun = HolderLink.start, list[str]()

    async def dies_once(link: HolderLink, argv: tuple[str, ...]) -> Held:
        held = await start(link, argv)
        begun.append("once")
        return held if begun[1:] else await asyncio.Event().wait()  # type: ignore[func-returns-value, return-value]

    monkeypatch.setattr(HolderLink, "start", dies_once)
    await plane.register("a", gpu=True)
    plane.order(Load(model="a"))
    await plane.until(lambda: begun)
    first = engine(plane)
    await plane.restart_worker()
    up = await plane.until(lambda: plane.up("a"))
    record = plane.record(up.instance)
    assert (record.engine, record.kind, record.pretends, begun) == (first, "fake", True, ["once"])


async def test_a_worker_that_died_before_its_report_sends_the_same_report(plane: Plant) -> None:
    await plane.register("a")
    plane.deaf = True
    plane.order(Load(model="a"))
    await plane.until(lambda: any(type(body).__name__ == "ReportUp" for body in plane.worker.sent))
    plane.deaf = False
    await plane.restart_worker()
    await plane.until(lambda: plane.up("a"))
    assert len(plane.of_type(InstanceUp)) == 1


async def test_what_died_while_no_worker_looked_is_cleared_and_told_as_gone(plane: Plant) -> None:
    await plane.register("a")
    up = await plane.load("a")
    record = plane.record(up.instance)
    await plane.worker.vanish()
    await kill(record.holder)
    assert record.engine is not None
    assert await processes.gone(record.engine, DEADLINE_S)
    await plane.restart_worker()
    assert (await failure(plane)).code == "lost"
    await plane.until(lambda: not (plane.data / "run" / "inst" / up.instance).exists())
    nothing_left(plane)


async def test_an_instance_that_the_plane_does_not_know_is_ended(plane: Plant) -> None:
    await plane.register("a")
    await plane.load("a")
    fleet = plane.fleet
    await plane.worker.vanish()
    plane.fleet = replace(fleet, instances=Map(), grants=Map())
    await plane.restart_worker()
    await plane.until(lambda: not plane.worker.reconciler.keepers)
    nothing_left(plane)


async def test_a_stop_while_it_loads_gives_the_climb_up_between_two_steps(plane: Plant) -> None:
    await plane.register("a", load_ms=60_000)
    plane.order(Load(model="a"))
    await plane.until(lambda: engine(plane))
    plane.order(Stop(model="a"))
    await plane.until(lambda: plane.of_type(InstanceEnded))
    assert plane.of_type(InstanceFailed) == []
    nothing_left(plane)


async def test_the_same_report_again_changes_nothing(plane: Plant) -> None:
    await plane.register("a")
    await plane.load("a")
    position = plane.fleet.position
    (report,) = [body for body in plane.worker.sent if type(body).__name__ == "ReportUp"]
    for _ in range(3):
        plane.worker.reporter.report(report)
        await plane.until(lambda: plane.worker.reporter.waiting == 0)
    assert plane.fleet.position == position


async def test_an_idle_instance_makes_room_and_the_waiting_request_is_routed(plane: Plant) -> None:
    await plane.register("a", kv_bytes=MIB)
    for name in ("b", "c"):
        await plane.register(name, kv_bytes=2 * MIB)
    await plane.load("a")
    await plane.load("b")
    request, queued = plane.admit("c")
    assert isinstance(queued, Queued)
    await plane.until(lambda: [r for r in plane.of_type(RequestRouted) if r.request == request])
    up = plane.up("c")
    assert up is not None
    assert (await plane.generate(up, request, "c"))[-1]["t"] == "end"
    plane.end(request)
    again, answer = plane.admit("c")
    assert isinstance(answer, Routed)
    plane.end(again)
