"""The rung `checkpoint` over the driver's twin: engines that pretend to hold a GPU leave it and come back, faults included."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.commands import Checkpoint, Load, RebuildImage, Retry, Save, Sleep, Tick
from controlplane.events import (
    ImageBuilt,
    ImageFailed,
    InstanceCheckpointed,
    InstanceFailed,
    InstanceSaved,
    InstanceUp,
    OperationFailed,
)
from controlplane.fleet import Instance
from controlplane.refusal import Refused
from controlplane.rungs import Rung
from tests.workshop import MIB, QUICK, Plant
from worker import checkpoint, gpus, hostmemory, processes
from worker.cuda.operation import Theatre
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderLink
from worker.images import budget, building
from worker.local import LocalInstance
from worker.moves import EngineState
from worker.parts import Parts

pytestmark = pytest.mark.timeout(120)


async def up(plane: Plant, name: str = "a", **arguments: Any) -> Instance:
    await plane.register(name, cells=8, kv_bytes=8 * MIB, gpu=True, **arguments)
    return await plane.load(name)


async def take_off(plane: Plant, name: str = "a") -> Instance:
    plane.order(Checkpoint(model=name))
    instance = next(i for i in plane.fleet.instances.values() if i.model == name)
    await plane.until(lambda: plane.fleet.instances[instance.instance].rung is Rung.CHECKPOINT)
    return plane.fleet.instances[instance.instance]


def letter(pid: int | None) -> str:
    """The kernel's letter for a process's state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def steps_of(plane: Plant) -> list[str]:
    event: Any = plane.of_type(InstanceUp)[-1]
    return [step.name for step in event.steps]


def images_possible(plane: Plant) -> None:
    if hindrance := plane.worker.images.hindrance:
        pytest.skip(f"engines can't be saved here: {hindrance}")


async def says(plane: Plant, instance: Instance, text: str) -> str:
    lines = await plane.generate(instance, f"req_{len(plane.events)}_{len(text)}", text)
    return "".join(line.get("text", "") for line in lines)


async def test_it_leaves_its_device_and_comes_back_with_the_same_process(plane: Plant) -> None:
    first = await up(plane)
    off = await take_off(plane)
    assert (off.pid, off.bytes_used) == (first.pid, 0)
    assert off.host_bytes > MIB
    assert not plane.fleet.grants
    assert letter(off.pid) == "T", "it answers nobody"
    again = await plane.load("a")
    assert (again.instance, again.pid, again.host_bytes) == (first.instance, first.pid, 0)
    names = steps_of(plane)
    assert names.index("take_cells") < names.index("cuda_restore") < names.index("attach")
    assert await says(plane, again, "hello") == "You said: hello"


async def test_nobody_asks_it_anything_while_it_is_off(plane: Plant) -> None:
    plane.deadlines = msgspec.structs.replace(QUICK, pulse=0.05, hung=0.3)
    await plane.restart_worker()
    await up(plane)
    off = await take_off(plane)
    await asyncio.sleep(1.5)  # five times what a hung engine is given
    assert plane.fleet.instances[off.instance].rung is Rung.CHECKPOINT
    assert (await plane.load("a")).pid == off.pid


async def test_the_next_worker_finds_it_and_brings_it_back(plane: Plant) -> None:
    await up(plane)
    off = await take_off(plane)
    await plane.restart_worker()
    assert plane.fleet.instances[off.instance].rung is Rung.CHECKPOINT
    assert (await plane.load("a")).pid == off.pid


async def test_one_that_dies_on_its_way_back_is_followed_by_another(plane: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dying(local: LocalInstance, _: object) -> None:
        engine = local.record.engine
        assert engine is not None and await processes.end(engine, grace_s=0)
        for _round in range(5):  # whoever watches it hears of it, and asks its holder
            await local.holder.ask()
        raise StepFailed("cuda_failed", "restore: the process is gone")

    first = await up(plane)
    off = await take_off(plane)
    monkeypatch.setattr(checkpoint, "_back", dying)
    again = await plane.load("a")
    assert again.instance == first.instance and again.pid != off.pid
    assert not plane.of_type(InstanceFailed)


@pytest.mark.parametrize("fault", ["restore_fails:1", "restore_hangs:1"])
async def test_a_restore_that_fails_is_final_for_the_process_and_the_caller_does_not_notice(plane: Plant, fault: str) -> None:
    """C17; C26 where the driver's call never returns."""
    plane.deadlines = msgspec.structs.replace(QUICK, cuda_restore=6.0)  # two are left for the way back
    await plane.restart_worker()
    first = await up(plane, fail=fault)
    await take_off(plane)
    again = await plane.load("a")
    assert again.instance == first.instance
    assert again.pid != first.pid
    assert {"cuda_restore", "start_engine", "connect"} <= set(steps_of(plane))
    assert not plane.of_type(InstanceFailed)
    assert await says(plane, again, "hello") == "You said: hello"


async def test_a_restore_that_fails_is_followed_by_the_image_if_there_is_one(plane: Plant) -> None:
    """C17."""
    images_possible(plane)
    fault = plane.data / "run" / "twin" / "failed-restore_fails"
    fault.parent.mkdir(parents=True)
    fault.write_bytes(b".")  # not yet
    first = await up(plane, fail="restore_fails:1")
    plane.order(Save(model="a"))
    await plane.until(lambda: plane.fleet.instances[first.instance].rung is Rung.SAVED)
    await plane.load("a")
    off = await take_off(plane)
    fault.unlink()
    again = await plane.load("a")
    assert again.pid != off.pid
    assert steps_of(plane).count("cuda_restore") == 2
    assert "start_engine" not in steps_of(plane)
    assert not plane.of_type(InstanceFailed)
    assert await says(plane, again, "hello") == "You said: hello"


def no_room_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room is asked of a driver, and the twin has none."""
    monkeypatch.setattr(checkpoint, "FREE_S", 0.0)
    monkeypatch.setattr(gpus, "free_bytes", lambda device: 4096)
    real = checkpoint._room

    async def asked(local: LocalInstance, where: Theatre) -> None:
        await real(local, Theatre())

    monkeypatch.setattr(checkpoint, "_room", asked)


async def test_c17_a_restore_for_which_there_is_no_room_is_not_begun_and_the_engine_stays_as_it_is(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await up(plane)
    off = await take_off(plane)
    need = plane.record(off.instance).skeleton_bytes
    with monkeypatch.context() as full:
        no_room_on_the_device(full)
        request, _ = plane.admit("a")
        back = await plane.until(lambda: plane.of_type(InstanceCheckpointed)[1:])
        assert plane.fleet.instances[off.instance].rung is Rung.CHECKPOINT
        assert not plane.fleet.grants, "the device is somebody else's"
        assert request in plane.fleet.requests, "its caller waits on"
        assert letter(off.pid) == "T"
    set_back = plane.fleet.models["a"].set_back
    assert set_back is not None and set_back.code == "no_device_memory"
    assert "4.0 KiB are free" in set_back.message
    assert float(re.findall(r"needs ([\d.]+) MiB", set_back.message)[0]) * MIB > need
    assert [event.host_bytes > MIB for event in back] == [True]
    plane.order(Retry(model="a"))
    await plane.until(lambda: plane.fleet.requests[request].instance == off.instance)
    again = plane.fleet.instances[off.instance]
    assert (again.rung, again.pid) == (Rung.UP, first.pid), "the very process"
    assert not plane.of_type(InstanceFailed)
    assert await says(plane, again, "hello") == "You said: hello"


async def test_one_that_stayed_off_its_device_is_found_so_by_the_next_worker(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await up(plane)
    off = await take_off(plane)
    with monkeypatch.context() as full:
        no_room_on_the_device(full)
        plane.order(Load(model="a"))
        await plane.until(lambda: plane.of_type(OperationFailed))
    await plane.restart_worker()
    assert plane.fleet.instances[off.instance].rung is Rung.CHECKPOINT
    plane.order(Retry(model="a"))
    assert (await plane.load("a")).pid == first.pid


async def test_an_image_that_could_not_be_proved_for_want_of_room_is_not_blamed(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    images_possible(plane)
    first = await up(plane)
    with monkeypatch.context() as full:
        no_room_on_the_device(full)
        plane.order(Save(model="a"))
        await plane.until(lambda: plane.of_type(OperationFailed))
    assert plane.of_type(OperationFailed)[-1].code == "no_device_memory"
    assert not plane.of_type(ImageFailed) and not plane.of_type(InstanceFailed)
    assert plane.fleet.instances[first.instance].rung is Rung.CHECKPOINT
    assert list((plane.data / "images").iterdir()) == []
    plane.order(Save(model="a"))
    await plane.until(lambda: plane.fleet.instances[first.instance].rung is Rung.SAVED)
    assert await says(plane, await plane.load("a"), "hello") == "You said: hello"


@pytest.mark.parametrize("order", [Checkpoint(model="a"), Save(model="a")], ids=["checkpoint", "save"])
async def test_without_memory_of_the_host_it_sleeps_on_and_both_numbers_are_said(
    plane: Plant, monkeypatch: pytest.MonkeyPatch, order: Checkpoint | Save
) -> None:
    """To disk it goes over the host, too."""
    if isinstance(order, Save):
        images_possible(plane)
    first = await up(plane)
    with monkeypatch.context() as full:
        full.setattr(hostmemory, "available_bytes", lambda: 4096)
        plane.order(order)
        await plane.until(lambda: plane.of_type(OperationFailed))
    failed = plane.of_type(OperationFailed)[-1]
    assert failed.code == "no_memory"
    assert re.search(r"needs [\d.]+ MiB of the host, which has 4\.0 KiB", failed.message)
    asleep = plane.fleet.instances[first.instance]
    assert (asleep.rung, asleep.pid) == (Rung.SLEEP, first.pid)
    assert not plane.fleet.grants and not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)
    assert (await plane.load("a")).pid == first.pid


async def test_a_rebuild_without_memory_of_the_host_leaves_its_skeleton_asleep(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    images_possible(plane)
    first = await up(plane)
    plane.order(Save(model="a"))
    await plane.until(lambda: plane.fleet.instances[first.instance].rung is Rung.SAVED)
    back = await plane.load("a")
    [image] = plane.fleet.images
    plane.order(RebuildImage(image=image))
    plane.order(Sleep(model="a"))
    await plane.until(lambda: plane.only().rung is Rung.SLEEP and plane.only().directive_settled)
    with monkeypatch.context() as full:
        full.setattr(hostmemory, "available_bytes", lambda: 4096)
        plane.order(Tick())
        assert not plane.only().directive_settled, "it has a place for the proof"
        await plane.until(lambda: plane.only().directive_settled)
    asleep = plane.only()
    assert asleep.directive is not None and asleep.directive.code == "no_memory"
    assert (asleep.rung, asleep.pid) == (Rung.SLEEP, back.pid)
    assert not plane.fleet.grants and not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)
    assert len(plane.of_type(ImageBuilt)) == 1
    again = await plane.load("a")
    assert again.pid == back.pid
    assert await says(plane, again, "hello") == "You said: hello"


async def test_an_operators_save_whose_dump_fills_the_disk_brings_the_engine_back_to_its_device(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    images_possible(plane)
    first = await up(plane)

    async def fills(self: HolderLink, *_: object, **__: object) -> None:
        raise HolderDenied("dump_failed", "write: No space left on device")

    monkeypatch.setattr(HolderLink, "dump", fills)
    monkeypatch.setattr(building, "FULL_BYTES", 1 << 62)
    plane.order(Save(model="a"))
    failed = (await plane.until(lambda: plane.of_type(OperationFailed)))[-1]
    assert failed.code == "no_space" and "ran full" in failed.message
    await plane.until(lambda: plane.only().directive_settled)
    assert (plane.only().rung, plane.only().pid) == (Rung.SLEEP, first.pid)
    assert not plane.fleet.grants and not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)
    again = await plane.load("a")
    assert again.pid == first.pid
    assert await says(plane, again, "hello") == "You said: hello"


@pytest.mark.parametrize("when", ["before", "within"])
async def test_one_that_is_off_its_device_stays_so_where_the_disk_has_no_room_for_it(
    plane: Plant, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    images_possible(plane)
    first = await up(plane)
    off = await take_off(plane)

    async def fills(self: HolderLink, *_: object, **__: object) -> None:
        raise HolderDenied("dump_failed", "criu ended with status 1: write: No space left on device")

    def full(self: budget.Budget, need_bytes: int) -> list[str]:
        raise budget.NoRoom("no_space", "an image needs about 2 GiB of room; there is 1 GiB")

    monkeypatch.setattr(*((HolderLink, "dump", fills) if when == "within" else (budget.Budget, "room_for", full)))
    plane.order(Save(model="a"))
    failed = (await plane.until(lambda: plane.of_type(OperationFailed)))[-1]
    assert failed.code == "no_space"
    await plane.until(lambda: plane.only().directive_settled)
    still = plane.only()
    assert (still.rung, still.pid, still.unsaved and still.unsaved.code) == (Rung.CHECKPOINT, first.pid, "no_space")
    assert letter(off.pid) == "T"
    assert not plane.fleet.grants and not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)
    again = await plane.load("a")
    assert again.pid == first.pid
    assert await says(plane, again, "hello") == "You said: hello"


async def test_engines_off_their_devices_are_in_the_hosts_ledger_and_bounded_by_it(plane: Plant) -> None:
    plane.checkpoint_bytes = 1 << 40
    await plane.restart_worker()
    await up(plane, skeleton_bytes=256 * MIB)  # beside which it is little what of the libraries is counted to others
    off = await take_off(plane)
    pages = hostmemory.taken_by(off.pid or 0)
    assert off.host_bytes == pytest.approx(pages, rel=0.05), "all that its processes take, as the kernel counts it"
    assert (await plane.load("a")).host_bytes == 0
    plane.checkpoint_bytes = off.host_bytes - 1
    await plane.restart_worker()
    with pytest.raises(Refused) as refused:
        plane.order(Checkpoint(model="a"))
    assert refused.value.details["reason"] == "no_host_memory"
    assert str(off.host_bytes) in refused.value.message and str(off.host_bytes - 1) in refused.value.message


async def test_an_image_whose_engine_does_not_come_back_to_its_gpu_proves_nothing(plane: Plant) -> None:
    images_possible(plane)
    await up(plane, fail="restore_fails:1")
    plane.order(Save(model="a"))
    await plane.until(lambda: plane.of_type(OperationFailed))
    assert plane.of_type(ImageFailed)[-1].step == "build"
    assert not plane.processes()
    again = await plane.load("a")
    assert await says(plane, again, "hello") == "You said: hello"


async def test_it_goes_to_disk_from_there_and_comes_back_from_the_disk(plane: Plant) -> None:
    images_possible(plane)
    first = await up(plane)
    await take_off(plane)
    there: Any = plane.of_type(InstanceCheckpointed)[-1]
    parts = {step.name: step.took_ms for step in there.steps if step.name.startswith("checkpoint.")}
    assert set(parts) == {"checkpoint.park", "checkpoint.cuda_ready", "checkpoint.cuda_checkpoint", "checkpoint.weigh"}
    assert sum(parts.values()) <= next(step.took_ms for step in there.steps if step.name == "checkpoint")
    plane.order(Save(model="a"))
    await plane.until(lambda: plane.fleet.instances[first.instance].rung is Rung.SAVED)
    saved: Any = plane.of_type(InstanceSaved)[-1]
    names = {step.name for step in saved.steps}
    assert {"build.dump", "build.cuda_restore"} <= names and "build.park" not in names, "it was parked already"
    assert not plane.processes()
    again = await plane.load("a")
    names = steps_of(plane)
    assert {"restore", "cuda_restore"} <= set(names)
    assert "start_engine" not in names
    assert plane.of_type(InstanceUp)[-1].image is not None
    assert await says(plane, again, "hello") == "You said: hello"


async def test_whoever_waits_for_a_place_is_brought_from_disk_to_checkpoint_meanwhile(plane: Plant) -> None:
    images_possible(plane)
    first = await up(plane)
    plane.order(Save(model="a"))
    await plane.until(lambda: plane.fleet.instances[first.instance].rung is Rung.SAVED)
    await plane.register("b", cells=8, kv_bytes=8 * MIB, tokens_per_s=30)
    other = await plane.load("b")
    request, _ = plane.admit("b")
    talking = asyncio.create_task(plane.generate(other, request, "x" * 60))
    plane.order(Load(model="a"))
    await plane.until(lambda: plane.fleet.instances[first.instance].rung is Rung.CHECKPOINT)
    event = plane.of_type(InstanceCheckpointed)[-1]
    assert event.image is not None
    assert {"restore", "stage"} <= {step.name for step in event.steps} | {"stage"}
    assert plane.fleet.instances[other.instance].running == 1, "the other one was not disturbed"
    await talking
    plane.end(request)
    await plane.until(lambda: plane.fleet.instances[first.instance].rung is Rung.UP)
    names = steps_of(plane)
    assert "cuda_restore" in names
    assert "restore" not in names


@pytest.mark.parametrize("fault", ["lock_hangs", "checkpoint_hangs", "checkpoint_fails"])
async def test_a_driver_that_hangs_or_fails_on_the_way_down_ends_the_instance_and_frees_its_device(
    plane: Plant, fault: str
) -> None:
    """C26."""
    if fault.endswith("hangs"):
        plane.deadlines = msgspec.structs.replace(QUICK, checkpoint=2.0)
        await plane.restart_worker()
    first = await up(plane, fail=fault)
    plane.order(Checkpoint(model="a"))
    await plane.until(lambda: plane.of_type(OperationFailed))
    failed = plane.of_type(InstanceFailed)[-1]
    assert (failed.instance, failed.step) == (first.instance, "checkpoint")
    assert failed.code == ("cuda_failed" if fault == "checkpoint_fails" else "step_deadline")
    assert not plane.processes()
    assert not plane.fleet.grants


async def test_a_worker_that_dies_between_lock_and_checkpoint_leaves_an_engine_that_the_next_one_unlocks(plane: Plant) -> None:
    first = await up(plane, fail="checkpoint_hangs:1")
    plane.order(Checkpoint(model="a"))
    hanging = plane.data / "run" / "twin" / "failed-checkpoint_hangs"  # noted after the lock
    await plane.until(hanging.exists)
    await plane.restart_worker()
    await plane.until(lambda: plane.fleet.instances[first.instance].rung is Rung.CHECKPOINT)
    assert (await plane.load("a")).pid == first.pid


async def test_what_is_awake_or_mapped_is_refused_and_stays_as_it_is(plane: Plant) -> None:
    await up(plane)
    (keeper,) = plane.worker.reconciler.keepers.values()
    with pytest.raises(StepFailed) as failed:
        await checkpoint.down(keeper.local, Parts())
    assert failed.value.code == "not_drained"
    plane.order(Sleep(model="a"))
    await plane.until(lambda: any(i.rung is Rung.SLEEP for i in plane.fleet.instances.values()))
    keeper.local.note(attached="ws_1")
    with pytest.raises(StepFailed) as failed:
        await checkpoint.down(keeper.local, Parts())
    assert failed.value.code == "still_mapped"
    assert keeper.local.seen.engine is EngineState.CONNECTED
    keeper.local.note(attached=None)


async def test_a_checkpointed_engine_that_is_killed_is_found_dead(plane: Plant) -> None:
    await up(plane)
    off = await take_off(plane)
    assert off.pid is not None
    os.kill(off.pid, signal.SIGKILL)
    await plane.until(lambda: plane.of_type(InstanceFailed))
    assert plane.of_type(InstanceFailed)[-1].code == "engine_died"
    await plane.load("a")


async def test_a_wrong_answer_after_it_came_back_is_never_served(plane: Plant) -> None:
    await up(plane)
    off = await take_off(plane)
    (known,) = (plane.data / "models" / "known").glob("*.json")
    known.write_bytes(known.read_bytes().replace(b"[", b"[7,"))
    plane.order(Load(model="a"))
    await plane.until(lambda: plane.of_type(InstanceFailed))
    failed = plane.of_type(InstanceFailed)[-1]
    assert (failed.instance, failed.step, failed.code) == (off.instance, "check", "check_mismatch")
    assert not plane.processes()
    known.unlink()
    plane.order(Retry(model="a"))
    assert await says(plane, await plane.load("a"), "hello") == "You said: hello"
