"""What goes wrong around images, with a real CRIU: each has a stable reason, nothing wrong is restored, nothing is left."""

import asyncio
import contextlib
import errno
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.commands import Load, RebuildImage, RemoveImage, ReviseModel, Save, Sleep, Stop, Tick
from controlplane.decisions import timers
from controlplane.events import (
    ImageBuilt,
    ImageFailed,
    ImageRoomFound,
    InstanceFailed,
    InstanceSlept,
    InstanceUp,
    OperationFailed,
    OperationSucceeded,
)
from controlplane.quantities import human_bytes
from controlplane.refusal import Refused
from controlplane.rungs import Rung
from controlplane.spec import Idle
from tests.imagehouse import Surgeon, able, flip, manifest, save, save_one, says
from tests.workshop import MIB, Plant, plant
from worker import filedigest, hostmemory, knownanswer, parked, processes
from worker import steps as worker_steps
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderLink
from worker.images import beside, budget, building, bulk, steps
from worker.images.manifest import Manifest
from worker.images.reading import Reading
from worker.images.store import Store
from worker.processes import Process

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def small_disk(plane: Plant) -> Iterator[Path]:
    """The image directory on a disk of its own, of 8 MiB."""
    able(plane)
    place = plane.data / "images"
    place.mkdir(mode=0o700, exist_ok=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no disk of its own can be mounted here: {mount.stderr}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
async def one_disk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plant]:
    """A plant whose whole data directory is on a disk of its own, as most are on one disk."""
    with tempfile.TemporaryDirectory(prefix="eh") as place:
        mount = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, text=True, check=False)
        if mount.returncode:
            pytest.skip(f"no disk of its own can be mounted here: {mount.stderr}")
        monkeypatch.setattr(tempfile, "tempdir", place)
        try:
            async with plant() as made:
                yield able(made)
        finally:
            subprocess.run(["umount", "-l", place], check=True)


async def refused_save(plane: Plant, name: str) -> OperationFailed:
    """Ask for a save that fails; nothing of the instance is left."""
    plane.order(Save(model=name))
    failed: OperationFailed = (await plane.until(lambda: plane.of_type(OperationFailed)))[-1]
    await plane.until(lambda: not plane.fleet.instances)
    assert plane.processes() == []
    assert not plane.fleet.grants
    return failed


async def test_a_disk_that_is_too_full_refuses_the_dump_with_both_numbers(plane: Plant, small_disk: Path) -> None:
    plane.image_quota_bytes = 1 << 40  # the quota is not what hinders it
    await plane.restart_worker()
    await plane.register("a")
    await plane.load("a")
    failed = await unsaved(plane, "a")
    assert failed.code == "no_space"
    assert str(small_disk) in failed.message and " of room; " in failed.message
    assert list(small_disk.iterdir()) == []


async def unsaved(plane: Plant, name: str) -> OperationFailed:
    """Ask for a save that the disk has no room for: the engine sleeps on as it was, and no image has failed."""
    before = plane.only()
    plane.order(Save(model=name))
    failed: OperationFailed = (await plane.until(lambda: plane.of_type(OperationFailed)))[-1]
    await plane.until(lambda: plane.only().directive_settled)
    asleep = plane.only()
    assert (asleep.rung, asleep.pid, asleep.directive and asleep.directive.code) == (Rung.SLEEP, before.pid, failed.code)
    assert not plane.fleet.grants and not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)
    again = await plane.load(name)
    assert again.pid == before.pid
    assert await says(plane, again, "as before") == "You said: as before"
    return failed


async def test_a_disk_that_runs_full_in_the_dump_leaves_nothing_half_written(
    plane: Plant, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget.Budget, "room_for", lambda self, need_bytes: [])  # it was there when it was looked for
    await plane.register("a")
    await plane.load("a")
    failed = await unsaved(plane, "a")
    assert failed.code == "no_space"
    assert "ran full" in failed.message
    assert list(small_disk.iterdir()) == []


async def test_an_engine_goes_on_where_its_dump_has_left_no_room_for_anything(
    one_disk: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release could not be written once: nobody knew of it any more, and its image was said to be a failed one."""
    monkeypatch.setattr(budget.Budget, "room_for", lambda self, need_bytes: [])
    await one_disk.register("a")
    await one_disk.load("a")
    size = filedigest.taken_bytes(one_disk.data) + 4 * MIB
    subprocess.run(["mount", "-o", f"remount,size={size}", str(one_disk.data.parent)], check=True)
    assert "ran full" in (await unsaved(one_disk, "a")).message


@pytest.mark.parametrize(("when", "code"), [("before", "over_quota"), ("within", "no_space")])
async def test_an_image_that_the_disk_has_no_room_to_make_anew_leaves_its_skeleton_asleep(
    plane: Plant, small_disk: Path, monkeypatch: pytest.MonkeyPatch, when: str, code: str
) -> None:
    subprocess.run(["mount", "-o", "remount,size=1g", str(small_disk)], check=True)
    await plane.register("a")
    await plane.load("a")
    await save(plane, "a")
    first = await plane.load("a")
    [image] = plane.fleet.images
    plane.order(RebuildImage(image=image))
    plane.order(Sleep(model="a"))
    await plane.until(lambda: plane.only().rung is Rung.SLEEP and plane.only().directive_settled)
    await plane.until(lambda: not list(small_disk.iterdir()))
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    if when == "within":
        monkeypatch.setattr(budget.Budget, "room_for", lambda self, need_bytes: [])
    plane.order(Tick())
    assert not plane.only().directive_settled, "it has a place for the proof"
    await plane.until(lambda: plane.only().directive_settled)
    asleep = plane.only()
    assert (asleep.rung, asleep.pid, asleep.directive and asleep.directive.code) == (Rung.SLEEP, first.pid, code)
    assert not plane.fleet.grants and not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)
    plane.order(Tick())
    assert plane.only().directive_settled, "and it is not tried again at once"
    again = await plane.load("a")
    assert again.pid == first.pid
    assert await says(plane, again, "hello") == "You said: hello"


async def until_idle_on_disk(plane: Plant) -> None:
    """Both limits are of a moment; each tick looks."""

    def there() -> bool:
        plane.order(Tick())
        return plane.only() is not None and plane.only().rung is Rung.SAVED

    await plane.until(there)


@pytest.mark.parametrize(("when", "code"), [("before", "over_quota"), ("within", "no_space")])
async def test_an_idle_engine_that_the_disk_has_no_room_for_sleeps_on_and_goes_there_once_there_is_some(
    plane: Plant, small_disk: Path, monkeypatch: pytest.MonkeyPatch, when: str, code: str
) -> None:
    """Its image was once a failed one, which nobody but an operator could mend, and the engine was gone."""
    monkeypatch.setattr(timers, "BACK_OFF_LIMIT_MS", 1)
    await plane.register("a", idle=Idle(sleep_ms=1, saved_ms=1))
    first = await plane.load("a")
    with monkeypatch.context() as others:
        if when == "within":  # it was there when it was looked for
            others.setattr(budget.Budget, "room_for", lambda self, need_bytes: [])
        await plane.until(lambda: plane.order(Tick()) and plane.only().unsaved)
    asleep = plane.only()
    assert (asleep.rung, asleep.pid, asleep.directive_settled, asleep.unsaved.code) == (Rung.SLEEP, first.pid, True, code)
    assert asleep.unsaved.message == plane.of_type(InstanceSlept)[-1].message
    assert len(re.findall(r"\d [KM]?i?B", asleep.unsaved.message)) == 2, "wanted, and there"
    assert not plane.fleet.grants and not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)
    assert list(small_disk.iterdir()) == [], "nothing half written"
    seen = len(plane.events)
    for _ in range(3):
        await plane.worker.room.look()
        plane.order(Tick())
    await plane.restart_worker()
    await plane.worker.room.look()
    plane.order(Tick())
    assert {e.type for e in plane.events[seen:]} <= {"NodeJoined"}, "and it is not tried for nothing"
    subprocess.run(["mount", "-o", "remount,size=1g", str(small_disk)], check=True)
    await plane.worker.room.look()
    await plane.until(lambda: plane.of_type(ImageRoomFound))
    await until_idle_on_disk(plane)
    assert plane.processes() == [] and not plane.fleet.grants
    assert len(plane.of_type(ImageRoomFound)) == 1 and plane.only().unsaved is None
    again = await plane.load("a")
    assert plane.of_type(InstanceUp)[-1].image is not None
    assert await says(plane, again, "from there") == "You said: from there"


async def test_an_idle_engine_that_found_no_room_on_disk_serves_as_before(plane: Plant, small_disk: Path) -> None:
    await plane.register("a", idle=Idle(sleep_ms=1, saved_ms=1))
    first = await plane.load("a")
    await plane.until(lambda: plane.order(Tick()) and plane.only().unsaved)
    again = await plane.load("a")
    assert (again.pid, again.unsaved) == (first.pid, None)
    assert await says(plane, again, "as before") == "You said: as before"


async def test_criu_killed_in_the_middle_of_a_restore_leaves_no_orphan_and_a_cold_start_follows(
    plane: Plant, surgeon: Surgeon
) -> None:
    await plane.register("a", skeleton_bytes=64 * MIB)
    await plane.load("a")
    await save(plane, "a")
    surgeon.do("restore", '$real "$@" & sleep 0.04; kill -9 $!; wait; exit 9')
    up = await plane.load("a")
    assert plane.of_type(InstanceUp)[-1].image is None
    assert await says(plane, up, "whole") == "You said: whole"
    record = plane.record(up.instance)
    ours = {record.holder.pid, record.engine.pid, record.frontend.pid}
    assert set(plane.processes()) == ours
    assert [one.pid for one in processes.in_session(record.engine.pid)] == [record.engine.pid]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_without_namespaces_a_holder_killed_in_the_middle_of_a_restore_leaves_nothing_behind(
    shared: Plant, surgeon_of_shared: Surgeon, when: str
) -> None:
    """No record says whose CRIU is, and what it has brought to life: where all share one pid namespace, they would go on."""
    await shared.register("a", skeleton_bytes=64 * MIB)
    first = await shared.load("a")
    await save(shared, "a")
    begun = shared.data / "criu" / "begun"
    restore = '$real "$@" && ' if when == "after" else ""
    surgeon_of_shared.do("restore", f"{restore} touch {begun}; sleep 600; : {shared.data}")
    shared.order(Load(model="a"))
    await shared.until(begun.exists)
    assert (processes.identify(first.pid or 0) is not None) == (when == "after"), "it has come to life"
    (instance,) = shared.fleet.instances.values()
    surgeon_of_shared.well()
    holder = shared.record(instance.instance).holder
    processes.send(holder, signal.SIGKILL)
    await shared.until(lambda: shared.of_type(InstanceFailed))
    await shared.until(lambda: not list((shared.data / "run" / "inst").iterdir()))
    assert shared.processes() == [], "before it is said to be gone"
    assert processes.identify(first.pid or 0) is None


@pytest.mark.parametrize("fault", ["truncate -s 4096 {image}/bulk-*.img", "rm {image}/bulk-*.map"])
async def test_memory_that_is_not_filled_gives_a_restore_up(
    plane: Plant, surgeon: Surgeon, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of an engine with half its memory ever runs: CRIU ends what it made, and a cold start follows."""
    monkeypatch.setattr(bulk, "LEAST_BYTES", 1)
    await plane.register("a")
    await plane.load("a")
    await save(plane, "a")
    path, _ = manifest(plane)
    surgeon.do("restore", fault.format(image=path))
    up = await plane.load("a")
    assert plane.of_type(InstanceUp)[-1].image is None
    assert await says(plane, up, "whole") == "You said: whole"
    record = plane.record(up.instance)
    assert set(plane.processes()) == {record.holder.pid, record.engine.pid, record.frontend.pid}
    log = plane.directory(up.instance).log("restore").read_text()
    assert re.search(r"Error: refill: bulk-\d+ is .* now, and was", log) or "No such file" in log, "with its reason"


async def test_an_image_that_is_removed_during_a_climb_has_not_failed(plane: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once came back as a failed one that was nowhere, and no other could be made before somebody removed it again."""
    await plane.register("a")
    await plane.load("a")
    await save(plane, "a")
    begun = list[str]()

    class Late(Reading):
        def __init__(self, store: Store, made: Manifest) -> None:
            plane.order(RemoveImage(image=made.image))
            store.remove(made.image)
            begun.append(made.image)
            super().__init__(store, made)

    monkeypatch.setattr(worker_steps, "Reading", Late)
    up = await plane.load("a")
    assert begun and plane.of_type(InstanceUp)[-1].image is None
    assert await says(plane, up, "whole") == "You said: whole"
    await plane.until(lambda: not plane.fleet.images)
    assert not plane.of_type(ImageFailed)
    await save(plane, "a")


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set no image's memory is compared."""
    verify, go = Store.verify, threading.Event()

    def late(store: Store, of: Manifest, *, memory: bool | None = None) -> None:
        if memory:
            go.wait(60)
        verify(store, of, memory=memory)

    monkeypatch.setattr(Store, "verify", late)
    yield go
    go.set()


async def parked_unread(house: Plant) -> Process:
    """Have the model's engine brought back: it is there, and waits for the comparison."""
    house.order(Load(model="a"))

    def parked_for_good() -> Any:
        found = house.only()
        record = house.directory(found.instance).read() if found is not None else None
        return record is not None and record.unread and record.engine

    engine = await house.until(parked_for_good)
    assert isinstance(engine, Process)
    return engine


@pytest.mark.parametrize("whole", [True, False])
async def test_no_engine_whose_image_is_not_compared_outlives_its_worker(
    house: Plant, go: threading.Event, whole: bool
) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    back = await parked_unread(house)
    if not whole:
        flip(path / "pages-1.img")
    await house.worker.vanish()
    began = time.monotonic()
    await house.restart_worker()
    assert time.monotonic() - began < 30, "nobody waits for digests before a worker's hello"
    assert await processes.ended(back, 30)
    assert house.up("a") is None, "it was not released"
    go.set()
    up = await house.until(lambda: house.up("a"))
    assert await says(house, up, "whole") == "You said: whole"
    assert house.record(up.instance).unread is False
    assert house.of_type(InstanceUp)[-1].image == (made.image if whole else None), "the climb began again"
    if not whole:
        assert (await house.until(lambda: house.of_type(ImageFailed)))[-1].code == "image_corrupt"


async def saved_by_an_impatient_worker(house: Plant, *, restore_s: float) -> Manifest:
    """`a` is on disk, and a restore may take no longer than that."""
    house.deadlines = msgspec.structs.replace(house.deadlines, restore=restore_s)
    await house.restart_worker()
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    return manifest(house)[1]


@pytest.mark.parametrize("why", ["its digests are late", "it dies beside them"])
async def test_an_engine_that_is_lost_before_its_image_is_compared_is_no_fault_of_the_image(
    house: Plant, go: threading.Event, why: str
) -> None:
    made = await saved_by_an_impatient_worker(house, restore_s=12.0)
    back = await parked_unread(house)
    if why == "it dies beside them":
        processes.send(back, signal.SIGKILL)
        assert await processes.ended(back, 30)
        go.set()
    up = await house.until(lambda: house.up("a"))
    assert not processes.alive(back)
    assert await says(house, up, "whole") == "You said: whole"
    assert house.of_type(InstanceUp)[-1].image is None
    assert house.worker.images.store.standing(made.image).failures == 0
    assert not house.of_type(InstanceFailed)


async def test_an_image_that_can_t_be_looked_through_in_time_is_left_for_a_cold_start(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CRIU goes by comes before it: a disk that gives nothing there was once the climb's end."""
    made = await saved_by_an_impatient_worker(house, restore_s=6.0)
    go = threading.Event()
    monkeypatch.setattr(Store, "verify", lambda *_, **__: go.wait(60))
    try:
        up = await house.load("a")
    finally:
        go.set()
    assert await says(house, up, "whole") == "You said: whole"
    assert house.of_type(InstanceUp)[-1].image is None and not house.of_type(InstanceFailed)
    assert house.worker.images.store.standing(made.image).failures == 0


async def test_a_criu_that_hangs_and_hears_nothing_is_killed_and_holds_up_nobody_else(plane: Plant, surgeon: Surgeon) -> None:
    """C26."""
    plane.deadlines = msgspec.structs.replace(plane.deadlines, restore=12.0)  # more than a cold start on a busy machine
    await plane.restart_worker()
    await plane.register("a")
    await plane.register("b", kv_bytes=2 * MIB)
    await plane.load("a")
    await save(plane, "a")
    surgeon.do("restore", "trap '' TERM; sleep 60")
    plane.order(Load(model="a"))
    plane.order(Load(model="b"))
    await plane.until(lambda: plane.up("b"))
    assert plane.up("a") is None, "it still waits for CRIU's deadline"
    neighbour = plane.up("b")
    assert await says(plane, neighbour, "meanwhile") == "You said: meanwhile"
    await plane.until(lambda: plane.up("a"))
    assert plane.of_type(InstanceUp)[-1].image is None
    assert not any(b"criu" in comm(pid) for pid in plane.processes())


def comm(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # it has just ended
        return Path(f"/proc/{pid}/comm").read_bytes()
    return b""


async def test_no_engine_is_started_beside_what_a_failed_restore_has_left(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")

    async def left(*_: object, **__: object) -> None:
        raise HolderDenied("unkillable", "pid 1001 of a failed restore outlives SIGKILL")

    with monkeypatch.context() as stuck:
        stuck.setattr(HolderLink, "restore", left)
        house.order(Load(model="a"))
        failed = (await house.until(lambda: house.of_type(InstanceFailed)))[-1]
    assert (failed.step, failed.code) == ("restore", "unkillable")
    assert "1001" in failed.message
    assert len(house.of_type(InstanceUp)) == 1
    assert house.processes() == []
    assert not house.fleet.grants


async def test_an_engine_that_does_not_come_back_in_its_build_fails_the_save_and_a_retry_works(  # N6
    plane: Plant, surgeon: Surgeon
) -> None:
    await plane.register("a")
    await plane.load("a")
    surgeon.do("restore", "exit 1")
    failed = await refused_save(plane, "a")
    assert failed.code == "restore_failed"
    image = plane.of_type(ImageFailed)[-1]
    assert image.step == "build"
    assert list((plane.data / "images").iterdir()) == [], "no draft is left"
    surgeon.well()
    plane.order(RebuildImage(image=image.image))
    await plane.load("a")
    await save(plane, "a")
    assert plane.of_type(ImageBuilt)[-1].image == image.image


@pytest.mark.parametrize("part", ["sync", "describe"])
async def test_a_disk_that_fails_beside_the_proof_leaves_no_image(
    house: Plant, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def failing(self: Store, image: str) -> None:
        raise OSError(errno.EIO, "a sector is gone")

    await house.register("a")
    await house.load("a")
    with monkeypatch.context() as bad:
        bad.setattr(Store, part, failing)
        failed = await refused_save(house, "a")
    assert failed.code == "image_failed"
    assert "a sector is gone" in failed.message
    assert house.of_type(ImageFailed)[-1].step == "build"
    assert not house.of_type(ImageBuilt)
    assert list((house.data / "images").iterdir()) == []


async def test_a_proved_image_is_not_one_before_the_disk_has_it(house: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    proved, go, sync, prove = threading.Event(), threading.Event(), Store.sync, building.prove

    def slow(self: Store, image: str) -> None:
        assert go.wait(60)
        sync(self, image)

    async def watched(*given: Any, **more: Any) -> str:
        found = await prove(*given, **more)
        proved.set()
        return found

    monkeypatch.setattr(Store, "sync", slow)
    monkeypatch.setattr(building, "prove", watched)
    await house.register("a")
    await house.load("a")
    house.order(Save(model="a"))
    await house.until(proved.is_set)
    (draft,) = (house.data / "images").iterdir()
    assert draft.name.endswith(".draft") and not (draft / "manifest.json").exists()
    assert not house.of_type(ImageBuilt)
    go.set()
    await house.until(lambda: house.only().rung is Rung.SAVED)
    path, made = manifest(house)
    assert house.of_type(ImageBuilt)[-1].image == path.name
    house.worker.images.store.verify(made)


async def test_an_engine_that_comes_back_in_a_build_has_answered_nothing_yet(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should the worker die before its proof, the next one must not take the answer from before the dump for its own."""
    proving = asyncio.Event()

    async def endless(*_: Any, **__: Any) -> str:
        proving.set()
        await asyncio.sleep(600)
        return ""

    monkeypatch.setattr(building, "prove", endless)
    await house.register("a")
    up = await house.load("a")
    assert house.record(up.instance).checked
    house.order(Save(model="a"))
    await house.until(proving.is_set)
    record = house.record(up.instance)
    assert (record.checked, record.checked_sets) == (False, ())


async def test_a_failed_proof_waits_for_the_disk_before_its_draft_goes(
    plane: Plant, surgeon: Surgeon, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, failed_already, go = threading.Event(), threading.Event(), threading.Event()
    drafts, end = list[bool](), beside.Beside.__aexit__

    def slow(self: Store, image: str) -> None:
        begun.set()
        assert go.wait(60)
        drafts.append((self.root / f"{image}.draft").is_dir())

    async def watched(self: beside.Beside, *raised: object) -> None:
        failed_already.set()
        await end(self, *raised)

    monkeypatch.setattr(Store, "sync", slow)
    monkeypatch.setattr(beside.Beside, "__aexit__", watched)
    await plane.register("a")
    await plane.load("a")
    surgeon.do("restore", "exit 1")
    plane.order(Save(model="a"))
    await plane.until(lambda: begun.is_set() and failed_already.is_set())
    assert not plane.of_type(ImageFailed) and not plane.of_type(OperationFailed), "a thread of it is at work still"
    go.set()
    failed = (await plane.until(lambda: plane.of_type(OperationFailed)))[-1]
    assert (failed.code, drafts) == ("restore_failed", [True])
    assert plane.of_type(ImageFailed)[-1].step == "build"
    assert list((plane.data / "images").iterdir()) == []
    assert not plane.of_type(ImageBuilt)


async def test_a_machine_without_the_memory_does_not_begin_a_restore_and_blames_no_image(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    with monkeypatch.context() as poor:
        poor.setattr(hostmemory, "available_bytes", lambda: 4096)
        house.order(Load(model="a"))
        failed = (await house.until(lambda: house.of_type(InstanceFailed)))[-1]
    assert (failed.step, failed.code) == ("restore", "no_memory")
    assert "has 4.0 KiB" in failed.message and human_bytes(manifest(house)[1].size_bytes) in failed.message
    assert house.processes() == []
    assert not house.fleet.grants
    assert house.of_type(ImageFailed) == []


async def test_a_restored_engine_that_answers_wrongly_is_never_up_and_a_cold_start_follows(  # C20, N23
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    right = knownanswer.check

    async def wrong_if_restored(local: Any) -> str:
        if local.restored_from is not None:
            raise StepFailed("check_mismatch", "the engine answered (1,), it used to answer (2,)")
        return await right(local)

    monkeypatch.setattr(steps.knownanswer, "check", wrong_if_restored)
    house.order(Load(model="a"))
    failed = (await house.until(lambda: house.of_type(InstanceFailed)))[-1]
    assert (failed.step, failed.code) == ("check", "check_mismatch")
    assert len(house.of_type(InstanceUp)) == 1, "it was never up"
    image = house.of_type(ImageFailed)[-1]
    assert (image.step, image.code) == ("check", "check_mismatch")
    await house.until(lambda: house.fleet.models["a"].set_back)
    up = await _loaded_again(house, "a")
    assert house.of_type(InstanceUp)[-1].image is None, "the image is left alone"
    assert await says(house, up, "right") == "You said: right"


async def _loaded_again(plane: Plant, name: str) -> Any:
    from controlplane.commands import Retry  # noqa: PLC0415

    plane.order(Retry(model=name))
    return await plane.load(name)


async def _restoring(plane: Plant, surgeon: Surgeon, **engine: object) -> tuple[Path, Path]:
    """Save a model's engine and begin to bring it back. Returns its image, and the file that lets CRIU go on."""
    begun, go = plane.data / "begun", plane.data / "go"
    await plane.register("a", **engine)
    await plane.load("a")
    await save(plane, "a")
    surgeon.do("restore", f"touch {begun}; while [ ! -e {go} ]; do sleep 0.02; done")
    plane.order(Load(model="a"))
    await plane.until(begun.exists)
    return manifest(plane)[0], go


async def test_a_restore_that_a_dead_worker_had_begun_is_not_the_images_fault(plane: Plant, surgeon: Surgeon) -> None:
    image, go = await _restoring(plane, surgeon)
    await plane.restart_worker()
    go.touch()
    again = await plane.until(lambda: plane.up("a"))
    assert await says(plane, again, "hello") == "You said: hello"
    assert plane.worker.images.store.standing(image.name).failures == 0
    assert not plane.of_type(ImageFailed)
    assert not plane.of_type(InstanceFailed)


async def test_an_engine_that_came_back_while_no_worker_looked_is_brought_to_its_device_and_checked_by_the_next(
    plane: Plant, surgeon: Surgeon
) -> None:
    image, go = await _restoring(plane, surgeon, gpu=True)
    await plane.worker.vanish()
    go.touch()
    directory = plane.directory(plane.only().instance)
    async with asyncio.timeout(30):
        while not (await HolderLink(directory).ask()).parked:
            await asyncio.sleep(0.02)
    record = directory.read()
    assert record is not None and (record.kind, record.pretends, record.unproven) == ("fake", True, image.name)
    directory.edit(unread=False)  # as one that had seen all of the image compared
    await plane.restart_worker()
    again = await plane.until(lambda: plane.up("a"))
    assert again.pid == record.engine.pid
    up = plane.of_type(InstanceUp)[-1]
    assert {"cuda_restore", "check"} <= {step.name for step in up.steps} and up.check == "same_tokens"
    assert await says(plane, again, "hello") == "You said: hello"
    assert plane.record(again.instance).unproven is None
    assert not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)


async def test_a_restore_that_a_dead_worker_had_begun_makes_way_for_a_cold_start(plane: Plant, surgeon: Surgeon) -> None:
    begun = plane.data / "begun"
    await plane.register("a")
    await plane.load("a")
    await save(plane, "a")
    surgeon.do("restore", f"touch {begun}; exec sleep 600")
    plane.order(Load(model="a"))
    await plane.until(begun.exists)
    await plane.worker.vanish()
    plane.worker.images.store.failed(manifest(plane)[0].name, "restore_failed", "found by somebody else", final=True)
    await plane.restart_worker()
    again = await plane.until(lambda: plane.up("a"))
    assert await says(plane, again, "hello") == "You said: hello"
    assert not plane.of_type(InstanceFailed)


async def test_an_engine_that_never_connects_after_its_restore_is_followed_by_a_cold_start(
    plane: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mute(*_: object) -> None:
        raise StepFailed("step_deadline", "the released engine did not connect within 1 s")

    await plane.register("a")
    before = await plane.load("a")
    await save(plane, "a")
    monkeypatch.setattr(parked, "release", mute)
    again = await plane.load("a")
    assert await says(plane, again, "hello") == "You said: hello"
    assert (again.instance, plane.of_type(InstanceUp)[-1].image) == (before.instance, None)
    assert not plane.of_type(InstanceFailed), "the end of the mute one was meant"


async def test_two_dumps_and_then_two_restores_at_once(house: Plant) -> None:
    """N18, beside one another."""
    await house.register("a", kv_bytes=MIB)
    await house.register("b", kv_bytes=2 * MIB)
    before = {name: await says(house, await house.load(name), "as ever") for name in ("a", "b")}
    for _ in range(2):
        house.order(Save(model="a"))
        house.order(Save(model="b"))
        await house.until(lambda: all(i.rung is Rung.SAVED for i in house.fleet.instances.values()))
        assert house.processes() == []
        house.order(Load(model="a"))
        house.order(Load(model="b"))
        await house.until(lambda: house.up("a") and house.up("b"))
        ups = house.of_type(InstanceUp)[-2:]
        assert len({event.image for event in ups} - {None}) == 2
        assert {name: await says(house, house.up(name), "as ever") for name in ("a", "b")} == before
    assert len(house.of_type(ImageBuilt)) == 2


async def test_a_save_right_after_a_request_waits_for_its_end(house: Plant) -> None:  # N4
    house.deadlines = msgspec.structs.replace(house.deadlines, drain=20.0)
    await house.restart_worker()
    await house.register("a", tokens_per_s=25)
    up = await house.load("a")
    text = "fifty tokens or so, one after the other, slowly"
    answering = asyncio.create_task(says(house, up, text))
    await house.until(lambda: _running(house, up.instance))
    house.order(Save(model="a"))
    assert house.fleet.operations, "the caller sees an operation"
    assert await answering == f"You said: {text}"
    done = (await house.until(lambda: [e for e in house.of_type(OperationSucceeded) if e.kind == "save"]))[-1]
    assert done.kind == "save"
    assert house.fleet.instances[up.instance].rung is Rung.SAVED


def _running(plane: Plant, instance: str) -> bool:
    """Whether the frontend has the request on record."""
    with contextlib.suppress(FileNotFoundError):  # a draft of a record has just got its name
        return any(path.stat().st_size for path in (plane.directory(instance).path / "record").glob("*"))
    return False


async def test_other_weights_are_staged_anew_and_the_image_stays(house: Plant) -> None:  # N21
    await house.register("a", weight_bytes=4 * MIB)
    await house.load("a")
    first = house.of_type(InstanceUp)[-1].weight_set
    await save(house, "a")
    spec = house.fleet.models["a"].spec
    house.order(ReviseModel(spec=msgspec.structs.replace(spec, arguments=spec.arguments | {"weight_bytes": 6 * MIB})))
    await house.until(lambda: house.fleet.models["a"].facts)
    await house.load("a")
    up = house.of_type(InstanceUp)[-1]
    assert up.weight_set != first
    assert up.image == manifest(house)[1].image
    assert house.of_type(ImageFailed) == []


async def test_a_worker_that_dies_in_a_build_leaves_no_orphan_and_the_next_one_ends_it(plane: Plant, surgeon: Surgeon) -> None:
    await plane.register("a")
    await plane.load("a")
    surgeon.do("dump", "sleep 0.5")
    plane.order(Save(model="a"))
    await plane.until(lambda: list((plane.data / "images").glob("*.draft")))
    await plane.restart_worker()
    surgeon.well()
    await plane.until(lambda: not plane.fleet.operations)
    plane.order(Stop(model="a"))
    await plane.until(lambda: not plane.fleet.instances)
    assert plane.processes() == []
    assert not plane.fleet.grants
    up = await _loaded_again(plane, "a")
    assert await says(plane, up, "again") == "You said: again"


@pytest.mark.parametrize("offset_s", [100_000, -60], ids=["booted-earlier", "booted-later"])
async def test_a_restore_under_another_clock_serves_within_seconds(  # N20
    house: Plant, monkeypatch: pytest.MonkeyPatch, offset_s: int
) -> None:
    spawn = processes.spawn

    def elsewhen(argv: list[str], **options: Any) -> processes.Process:
        if "worker.holder" in argv:
            argv = ["unshare", "--time", f"--monotonic={offset_s}", "--fork", "--", *argv]
        return spawn(argv, **options)

    probe = subprocess.run(["unshare", "--time", "--monotonic=1", "--fork", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no time namespaces here")
    await house.register("a", tokens_per_s=200)
    await house.load("a")
    await save_one(house, "a")
    monkeypatch.setattr("worker.holderlink.processes.spawn", elsewhen)
    up = await house.load("a")
    event = house.of_type(InstanceUp)[-1]
    assert event.image is not None
    assert os.readlink(f"/proc/{up.pid}/ns/time") != os.readlink("/proc/self/ns/time")
    assert await says(house, up, "what time is it") == "You said: what time is it"


OLD_CRIU = """#!/bin/sh
[ "$1" = --version ] && { echo "Version: 3.17.1"; exit 0; }
echo "Error: Unexpected rt vDSO area bounds" >&2
exit 1
"""


@pytest.mark.parametrize("lack", ["criu", "root"])
async def test_without_a_fit_criu_or_root_the_ladder_ends_at_sleep_and_says_why(
    plane: Plant, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    if lack == "criu":
        program = plane.data / "criu" / "criu"
        program.parent.mkdir()
        program.write_text(OLD_CRIU)
        program.chmod(0o700)
    else:
        able(plane)
        monkeypatch.setattr("worker.images.cabinet.os.geteuid", lambda: 1000)
    await plane.restart_worker()
    await plane.register("a")
    up = await plane.load("a")
    with pytest.raises(Refused) as caught:
        plane.order(Save(model="a"))
    assert caught.value.details["reason"] == "not_available"
    assert ("vDSO" if lack == "criu" else "needs root") in caught.value.message
    plane.order(Sleep(model="a"))
    await plane.until(lambda: plane.only().rung is Rung.SLEEP)
    up = await plane.load("a")
    assert await says(plane, up, "still here") == "You said: still here"
