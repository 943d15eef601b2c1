"""The ladder with real processes: climbs, descents, switches."""

from pathlib import Path

from controlplane.commands import Load, Sleep, Stop
from controlplane.events import InstanceEnded, InstanceFailed, InstanceSlept, InstanceUp, WeightsStaged
from controlplane.rungs import Rung
from tests.workshop import DEVICE, MIB, Plant


async def test_a_model_climbs_serves_sleeps_wakes_and_ends(plane: Plant) -> None:
    await plane.register("a", kv_bytes=8 * MIB)
    up = await plane.load("a")
    event = plane.of_type(InstanceUp)[-1]
    names = [step.name for step in event.steps]
    assert {"prepare", "stage", "start_holder", "start_engine", "connect", "start_frontend"} <= set(names)
    assert names[-5:] == ["take_cells", "attach", "wake", "check", "serve"]
    assert event.check == "recorded"
    assert event.bytes_mapped >= 4 * MIB
    assert event.bytes_used >= event.bytes_mapped + 8 * MIB
    assert plane.of_type(WeightsStaged)[-1].weight_set == event.weight_set
    claim = plane.worker.locks.holder(DEVICE, 0)
    assert claim is not None
    assert (claim.grant, claim.instance) == (up.grant, up.instance)
    lines = await plane.generate(up, "req_1", "hello")
    assert "".join(line.get("text", "") for line in lines) == "You said: hello"

    plane.order(Sleep(model="a"))
    await plane.until(lambda: plane.only().rung is Rung.SLEEP)
    slept = plane.of_type(InstanceSlept)[-1]
    assert [step.name for step in slept.steps] == ["stop_serving", "drain", "sleep", "detach", "verify", "drop_cells"]
    assert slept.bytes_used < event.bytes_used
    assert plane.worker.locks.holder(DEVICE, 0) is None

    again = await plane.load("a")
    assert again.instance == up.instance
    assert again.pid == up.pid
    event = plane.of_type(InstanceUp)[-1]
    assert [step.name for step in event.steps] == ["take_cells", "attach", "wake", "serve"]
    assert event.check == "skipped"

    plane.order(Stop(model="a"))
    await plane.until(lambda: plane.of_type(InstanceEnded))
    assert plane.processes() == []
    assert list((plane.data / "run" / "inst").iterdir()) == []
    assert plane.worker.locks.holder(DEVICE, 0) is None


async def test_one_skeleton_switches_between_two_models(plane: Plant) -> None:
    await plane.register("a")
    await plane.register("b", weight_bytes=6 * MIB)
    first = await plane.load("a")
    plane.order(Sleep(model="a"))
    await plane.until(lambda: plane.only().rung is Rung.SLEEP)
    second = await plane.load("b")
    assert (second.instance, second.pid) == (first.instance, first.pid)
    assert "".join(x.get("text", "") for x in await plane.generate(second, "req_1", "b?")) == "You said: b?"


async def test_the_second_start_of_a_process_compares_its_answer(plane: Plant) -> None:
    await plane.register("a")
    await plane.load("a")
    plane.order(Stop(model="a"))
    await plane.until(lambda: plane.of_type(InstanceEnded))
    await plane.load("a")
    assert plane.of_type(InstanceUp)[-1].check == "same_tokens"


async def test_another_answer_than_before_fails_the_climb(plane: Plant) -> None:
    await plane.register("a")
    await plane.load("a")
    plane.order(Stop(model="a"))
    await plane.until(lambda: plane.of_type(InstanceEnded))
    (known,) = (plane.data / "models" / "known").iterdir()
    Path(known).write_text(known.read_text().replace("[", "[7,"))
    failure = await failed_load(plane, "a")
    assert (failure.code, failure.step) == ("check_mismatch", "check")
    assert plane.processes() == []


async def failed_load(plane: Plant, name: str):
    plane.order(Load(model=name))
    await plane.until(lambda: plane.of_type(InstanceFailed))
    return plane.of_type(InstanceFailed)[-1]
