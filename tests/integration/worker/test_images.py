"""Saved skeletons with a real CRIU: engines go to disk and come back, whatever happens to the images meanwhile."""

import asyncio
import os
import shutil
import signal
import stat
from functools import partial
from pathlib import Path

import msgspec
import pytest

from controlplane.commands import Load, PinImage, RebuildImage, RemoveImage, Save, Sleep, Stop, Tick
from controlplane.events import (
    ImageBuilt,
    ImageFailed,
    ImageRefused,
    ImageRemoved,
    InstanceEnded,
    InstanceSaved,
    InstanceUp,
    OperationFailed,
)
from controlplane.quantities import human_bytes
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from pool.arena import READY
from pool.place import place
from tests.imagehouse import Surgeon, able, flip, manifest, save, save_one, says
from tests.poolroom import descriptors
from tests.workshop import MIB, Plant
from worker.images import bulk, criu
from worker.images.fingerprint import Fingerprint
from worker.images.manifest import ImageBroken

pytestmark = pytest.mark.timeout(180)


async def test_a_model_goes_to_disk_and_serves_again_from_there(house: Plant) -> None:
    await house.register("a", kv_bytes=8 * MIB)
    up = await house.load("a")
    saved = await save(house, "a")
    assert not house.fleet.grants, "the cells are free"
    built = house.of_type(ImageBuilt)[-1]
    steps = {step.name: step.took_ms for step in house.of_type(InstanceSaved)[-1].steps}
    parts = ("dump", "lift", "restore", "attach", "wake", "check", "asleep", "disk_wait", "publish")
    assert sum(steps[f"build.{part}"] for part in parts) <= steps["build"], "one after another"
    assert {"build.mapped", "build.sync", "build.digests"} < set(steps), "and these beside them"
    assert built.proof == "same_tokens", "restored once, and its answer compared, before it was published"
    assert (saved.image, built.configuration) == (built.image, up.configuration)
    path, made = manifest(house)
    assert path.stat().st_mode & 0o777 == 0o700
    assert made.size_bytes == built.size_bytes

    again = await house.load("a")
    event = house.of_type(InstanceUp)[-1]
    assert again.instance == up.instance
    assert event.image == built.image
    names = [step.name for step in event.steps]
    assert "restore" in names
    assert "start_engine" not in names
    assert event.check == "same_tokens"
    assert await says(house, again, "hello") == "You said: hello"


async def test_ten_round_trips_with_new_workers_between_leave_nothing_behind(house: Plant) -> None:
    await house.register("a", kv_bytes=8 * MIB)
    up = await house.load("a")
    before = await says(house, up, "round and round")
    await save(house, "a")
    _, made = manifest(house)
    segments, figures = place(house.data / "run" / "pool" / "segments", 0), []

    def counted() -> tuple[int, int, int]:
        """Descriptors of the worker's process, and the pool's; files in /dev/shm."""
        pool = os.listdir(f"/proc/{house.pool.pid}/fd")
        return descriptors(), len(pool), len(list(segments.iterdir()))

    assert any(segments.iterdir())
    await house.until(lambda: any((segments / READY).glob("*")))  # what the pool makes in spare time; then it rests
    for turn in range(10):
        await house.restart_worker()
        again = await house.load("a")
        assert await says(house, again, "round and round") == before
        assert house.of_type(InstanceUp)[-1].image == made.image
        await save(house, "a")
        if turn:
            figures.append(counted())
    least = [min(each) for each in zip(*figures, strict=True)]  # what has just ended may still be counted for a moment
    await house.until(lambda: all(now <= before for now, before in zip(counted(), least, strict=True)))
    used = [event.bytes_used for event in house.of_type(InstanceUp)][1:]
    assert max(used) - min(used) < MIB, "of the engine's memory"
    assert manifest(house)[1].size_bytes == made.size_bytes
    assert len(house.of_type(ImageBuilt)) == 1, "a skeleton that is on disk is not written again"
    assert len(house.of_type(InstanceSaved)) == 11


async def test_the_bulk_of_the_memory_comes_back_beside_criu(house: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LEAST_BYTES", 1)
    await house.register("a")
    before = await says(house, await house.load("a"), "in several threads")
    await save(house, "a")
    path, made = manifest(house)
    size = {file.name: file.size_bytes for file in made.files}
    left = sum(size[name] for name in size if name.startswith("pages-"))
    assert size[f"bulk-{made.pid}.img"] > 4 * left, "what CRIU brings back itself is little"
    for _ in range(2):
        again = await house.load("a")
        assert await says(house, again, "in several threads") == before
        assert house.of_type(InstanceUp)[-1].image == path.name
        filled = int((house.directory(again.instance).path / "refilled").read_text())
        assert size[f"bulk-{made.pid}.img"] * 0.8 < filled <= size[f"bulk-{made.pid}.img"]
        await save(house, "a")
    assert set(bulk.areas_of_threads(path)), "each thread has pages that the kernel writes to"
    for name in (f"bulk-{made.pid}.img", f"bulk-{made.pid}.map"):
        flip(path / name)
        with pytest.raises(ImageBroken, match=name) as broken:
            house.worker.images.store.verify(made)
        assert broken.value.code == "image_corrupt"
        flip(path / name)
    house.worker.images.store.verify(made)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_fifty_round_trips_of_three_instances_in_turn(house: Plant) -> None:  # C50
    names = ("a", "b", "c")
    for nth, name in enumerate(names):
        await house.register(name, kv_bytes=(nth + 1) * MIB)
    texts = {}
    for name in names:
        texts[name] = await says(house, await house.load(name), f"it is {name}")
        await save_one(house, name)
    sizes = {image.image: image.size_bytes for image in house.fleet.images.values()}
    for turn in range(50):
        if turn % 5 == 4:
            await house.restart_worker()
        for name in names:
            assert await says(house, await house.load(name), f"it is {name}") == texts[name]
            await save_one(house, name)
    assert house.processes() == []
    assert {image.image: image.size_bytes for image in house.fleet.images.values()} == sizes
    assert len(house.of_type(ImageBuilt)) == len(names)
    used = [event.bytes_used for event in house.of_type(InstanceUp) if event.model == "a"][1:]
    assert max(used) - min(used) < MIB


async def test_what_was_restored_can_be_saved_anew(house: Plant) -> None:
    await house.register("a")
    await house.load("a")
    sizes = []
    for _ in range(3):
        await save(house, "a")
        sizes.append(manifest(house)[1].size_bytes)
        again = await house.load("a")
        assert await says(house, again, "anew") == "You said: anew"
        house.worker.images.remove(manifest(house)[0].name)
    assert max(sizes) < min(sizes) * 1.1
    assert len(house.of_type(ImageBuilt)) == 3


async def test_two_models_run_from_one_image_at_once(house: Plant) -> None:
    """N18."""
    await house.register("a")
    await house.register("b", weight_bytes=6 * MIB)
    await house.load("a")
    await save(house, "a")
    house.order(Load(model="a"))
    house.order(Load(model="b"))
    await house.until(lambda: house.up("a") and house.up("b"))
    first, second = house.up("a"), house.up("b")
    assert first.instance != second.instance
    assert [event.image for event in house.of_type(InstanceUp)[-2:]] == [manifest(house)[1].image] * 2
    assert await says(house, first, "one") == "You said: one"
    assert await says(house, second, "two") == "You said: two"


async def siblings(plane: Plant) -> None:
    """Models `a` and `b`, each up on a skeleton of its own, of one configuration."""
    await plane.register("a")
    await plane.register("b", weight_bytes=6 * MIB)
    plane.order(Load(model="a"))
    plane.order(Load(model="b"))
    await plane.until(lambda: plane.up("a") and plane.up("b"))


async def test_two_skeletons_that_are_saved_at_once_write_one_image(house: Plant) -> None:
    await siblings(house)
    house.order(Save(model="a"))
    house.order(Save(model="b"))
    await house.until(lambda: len(house.of_type(InstanceSaved)) + len(house.of_type(ImageFailed)) == 2)
    assert house.processes() == []
    assert len(house.of_type(ImageBuilt)) == 1
    assert {event.image for event in house.of_type(InstanceSaved)} == {manifest(house)[1].image}
    assert house.of_type(ImageFailed) == []


async def test_a_skeleton_that_waited_for_anothers_image_writes_its_own_when_that_fails(plane: Plant, surgeon: Surgeon) -> None:
    await siblings(plane)
    once, go, other = plane.data / "criu" / "once", plane.data / "criu" / "go", plane.up("b").instance
    surgeon.do("dump", f"if mkdir {once}; then while [ ! -e {go} ]; do sleep 0.02; done; exit 1; fi")
    plane.order(Save(model="a"))
    await plane.until(once.is_dir)
    plane.order(Save(model="b"))
    await plane.until(lambda: any((one.subject, one.step) == (other, "build") for one in plane.worker.site.board.shown))
    go.touch()
    await plane.until(lambda: plane.of_type(InstanceSaved))
    assert len(plane.of_type(ImageFailed)) == 1
    assert [failed.model for failed in plane.of_type(OperationFailed)] == ["a"]
    assert plane.of_type(InstanceSaved)[0].image == manifest(plane)[1].image


async def test_a_sleeper_is_saved_too_once_its_place_is_free(house: Plant) -> None:
    await house.register("a")
    await house.load("a")
    house.order(Sleep(model="a"))
    await house.until(lambda: house.only().rung is Rung.SLEEP)
    await save(house, "a")
    assert house.of_type(ImageBuilt)[-1].proof == "same_tokens"
    assert not house.fleet.grants


async def test_a_saved_instance_ends_when_it_is_stopped(house: Plant) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    house.order(Stop(model="a"))
    await house.until(lambda: house.of_type(InstanceEnded))
    assert not house.fleet.instances
    assert manifest(house), "the image stays for the next one"


@pytest.mark.parametrize("field", ["engine", "kernel", "cpu", "criu", "torch"])
async def test_an_image_of_another_day_is_refused_by_name_and_made_anew(house: Plant, field: str) -> None:
    """C23, N21."""
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    other = msgspec.structs.replace(made.fingerprint, **{field: "fake of yesterday"})
    (path / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(made, fingerprint=other)))
    await house.load("a")
    assert house.of_type(InstanceUp)[-1].image is None, "it started cold"
    refused = await house.until(lambda: house.of_type(ImageRefused))
    assert refused[-1].code == f"{field}_changed"
    assert "fake of yesterday" in refused[-1].message
    await save(house, "a")
    assert len(house.of_type(ImageBuilt)) == 2
    await house.load("a")
    assert house.of_type(InstanceUp)[-1].image == made.image


async def test_each_fact_that_differs_refuses_an_image_before_criu_starts(house: Plant) -> None:
    """C23, N21: the manifest is edited field by field."""
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    configuration, engine = made.fingerprint.configuration, made.fingerprint.engine.partition(" ")[0]
    find = partial(asyncio.to_thread, house.worker.images.find, configuration, engine)
    assert await find() is not None
    for field in Fingerprint.__struct_fields__:
        other = msgspec.structs.replace(made.fingerprint, **{field: "of yesterday"})
        (path / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(made, fingerprint=other)))
        assert await find() is None, field
        refused = await house.until(lambda: [e for e in house.of_type(ImageRefused) if e.code == f"{field}_changed"])  # noqa: B023
        assert "of yesterday" in refused[-1].message
    (path / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(made, image="img_0123456789abcdef")))
    assert await find() is None
    assert (await house.until(lambda: house.of_type(ImageFailed)))[-1].code == "manifest_broken"


async def test_a_library_that_was_replaced_refuses_the_image(house: Plant) -> None:
    """C23."""
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    (first, *rest) = made.mapped
    other = (msgspec.structs.replace(first, size_bytes=first.size_bytes + 1), *rest)
    (path / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(made, mapped=other)))
    await house.load("a")
    refused = await house.until(lambda: house.of_type(ImageRefused))
    assert refused[-1].code == "files_changed"
    assert house.of_type(InstanceUp)[-1].image is None


async def test_a_stale_image_is_made_anew_in_the_background_and_its_skeleton_sleeps_on(house: Plant) -> None:
    await house.register("a", kv_bytes=8 * MIB)
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    old = path.rename(path.with_name("img_0123456789abcdef"))  # as a kernel of yesterday would have named it
    yesterday = msgspec.structs.replace(made.fingerprint, kernel="of yesterday")
    stale = msgspec.structs.replace(made, image=old.name, fingerprint=yesterday)
    (old / "manifest.json").write_bytes(msgspec.json.encode(stale))
    await house.restart_worker()
    assert (await house.until(lambda: house.of_type(ImageRefused)))[-1].code == "kernel_changed"
    up = await house.load("a")
    house.order(Sleep(model="a"))
    await house.until(lambda: house.only().rung is Rung.SLEEP and house.only().directive_settled)
    house.order(Tick())
    assert not house.only().directive_settled, "it has a place for the proof"
    await house.until(lambda: house.only().directive_settled)
    assert not house.fleet.grants
    assert house.of_type(ImageBuilt)[-1].image == made.image
    await house.until(lambda: [event.code for event in house.of_type(ImageRemoved)] == ["lost", "replaced"])
    assert [found.name for found in (house.data / "images").iterdir()] == [made.image]
    assert house.only().instance == up.instance, "its process went on"
    house.order(Tick())
    assert house.only().directive_settled, "once is enough"
    again = await house.load("a")
    assert house.of_type(InstanceUp)[-1].image is None, "it was awake in a moment, from sleep"
    assert await says(house, again, "anew") == "You said: anew"
    await save(house, "a")
    await house.load("a")
    assert house.of_type(InstanceUp)[-1].image == made.image


async def test_an_image_that_is_asked_for_anew_is_not_used_again(house: Plant) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    house.order(RebuildImage(image=made.image))
    await house.until(lambda: not path.exists())
    await house.load("a")
    assert house.of_type(InstanceUp)[-1].image is None
    house.order(Sleep(model="a"))
    await house.until(lambda: house.only().rung is Rung.SLEEP and house.only().directive_settled)
    house.order(Tick())
    await house.until(lambda: len(house.of_type(ImageBuilt)) == 2)
    assert house.fleet.images[made.image].state == "ok"


async def test_a_removal_that_no_worker_heard_is_carried_out_by_the_next(house: Plant) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    await house.worker.vanish()
    house.order(RemoveImage(image=made.image))
    assert path.exists()
    await house.restart_worker()
    await house.until(lambda: not house.fleet.images)
    assert not path.exists()


async def test_a_quota_lets_the_least_valuable_go_and_spares_the_pinned(plane: Plant) -> None:
    able(plane)
    for name in ("a", "b"):  # two configurations
        await plane.register(name, kv_bytes=(1 if name == "a" else 2) * MIB)
        await plane.load(name)
        await save_one(plane, name)
    size = max(image.size_bytes for image in plane.fleet.images.values())
    first = plane.of_type(ImageBuilt)[0].image
    plane.image_quota_bytes = int(size * 2.5)
    await plane.restart_worker()
    plane.order(PinImage(image=first))
    await plane.register("c", kv_bytes=3 * MIB)
    await plane.load("c")
    await save_one(plane, "c")
    gone = await plane.until(lambda: plane.of_type(ImageRemoved))
    assert [(event.code, event.image == first) for event in gone] == [("quota", False)]
    assert first in plane.fleet.images

    plane.image_quota_bytes = int(size * 0.7)
    await plane.restart_worker()
    await plane.register("d", kv_bytes=4 * MIB)
    await plane.load("d")
    plane.order(Save(model="d"))
    failed = (await plane.until(lambda: plane.of_type(OperationFailed)))[-1]
    assert failed.code == "over_quota"
    assert human_bytes(plane.image_quota_bytes) in failed.message
    assert first in plane.fleet.images, "nothing was removed for one that does not fit anyway"


def corrupt(path: Path) -> None:
    flip(path / "pages-1.img")


def truncate(path: Path) -> None:
    os.truncate(path / "pages-1.img", 4096)


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def garble_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (corrupt, "image_corrupt"), (truncate, "image_truncated"), (lose_manifest, "manifest_missing"),
        (garble_manifest, "manifest_broken"),
    ],
)  # fmt: skip
async def test_a_damaged_image_is_never_restored_and_stays_failed_until_somebody_acts(house: Plant, damage, code: str) -> None:
    """C25."""
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    damage(path)
    again = await house.load("a")
    assert await says(house, again, "whole") == "You said: whole"
    assert house.of_type(InstanceUp)[-1].image is None, "it started cold"
    failed = await house.until(lambda: house.of_type(ImageFailed))
    assert failed[-1].code == code
    with pytest.raises(Refused) as caught:
        house.order(Save(model="a"))
    assert caught.value.code is Code.NOT_AVAILABLE
    assert caught.value.details["reason"] == "image_failed"
    house.order(RemoveImage(image=made.image))
    await house.until(lambda: not house.fleet.images)
    assert house.of_type(ImageRemoved)[-1].by == "operator:test"
    await save(house, "a")
    assert len(house.of_type(ImageBuilt)) == 2


async def test_a_half_written_image_is_removed_at_the_next_start(house: Plant) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    half = path.with_name("img_0123456789abcdef.draft")
    shutil.copytree(path, half)
    (path / "manifest.json").unlink()
    await house.restart_worker()
    assert list((house.data / "images").iterdir()) == []
    assert made.image not in house.fleet.images
    again = await house.load("a")
    assert await says(house, again, "anyway") == "You said: anyway"


@pytest.mark.parametrize(
    ("script", "code"), [("sleep 60", "step_deadline"), ("kill -9 $$", "restore_failed"), ("exit 1", "restore_failed")]
)
async def test_a_restore_that_fails_falls_back_and_is_tried_twice(
    plane: Plant, surgeon: Surgeon, script: str, code: str
) -> None:
    """C25; C26 where it never returns."""
    await plane.register("a")
    await plane.load("a")
    await save(plane, "a")
    surgeon.do("restore", script)
    for attempt in (1, 2):
        again = await plane.load("a")
        assert await says(plane, again, "cold") == "You said: cold"
        assert plane.of_type(InstanceUp)[-1].image is None
        assert len(plane.of_type(ImageFailed)) == attempt - 1, "one failure may be chance"
        plane.order(Stop(model="a"))
        await plane.until(lambda: not plane.fleet.instances)
        assert plane.processes() == []
    # The second failure is told with the climb that met it.
    failed = plane.of_type(ImageFailed)
    assert [event.code for event in failed] == [code]
    surgeon.well()
    await plane.load("a")
    assert plane.of_type(InstanceUp)[-1].image is None, "not tried again until an operator acts"


async def test_a_dump_that_fails_ends_the_operation_with_its_reason(plane: Plant, surgeon: Surgeon) -> None:
    await plane.register("a")
    await plane.load("a")
    surgeon.do("dump", "exit 3")
    plane.order(Save(model="a"))
    failed = (await plane.until(lambda: plane.of_type(OperationFailed)))[-1]
    assert (failed.kind, failed.code) == ("save", "dump_failed")
    assert (await plane.until(lambda: plane.of_type(ImageFailed)))[-1].step == "build"
    assert plane.processes() == []
    assert not plane.fleet.grants
    surgeon.well()
    assert (await plane.load("a")).model == "a"


async def test_no_text_of_a_caller_is_in_an_image(house: Plant) -> None:
    await house.register("a", kv_bytes=8 * MIB)
    up = await house.load("a")
    marker = "MARK-" + "-".join(["zebra", "quux", "harbour", "lantern"])
    for length in (1, 20, 60):
        lines = await house.generate(up, f"req_{length}", marker * length, max_tokens=2000)
        assert marker in "".join(line.get("text", "") for line in lines)
    await save(house, "a")
    path, _ = manifest(house)
    for file in path.iterdir():
        data = file.read_bytes()
        assert marker.encode() not in data, file.name
        assert marker.encode("utf-16-le") not in data, file.name
        assert marker.encode("utf-32-le") not in data, file.name


async def test_without_namespaces_a_saved_engine_comes_back_with_its_pid(shared: Plant) -> None:
    await shared.register("a", kv_bytes=8 * MIB)
    up = await shared.load("a")
    assert shared.record(up.instance).engine.pid == up.pid
    await save(shared, "a")
    await shared.restart_worker()
    again = await shared.load("a")
    assert again.pid == up.pid
    assert shared.of_type(InstanceUp)[-1].image is not None
    assert await says(shared, again, "shared") == "You said: shared"


async def test_without_namespaces_a_pid_that_is_taken_leads_to_a_cold_start(shared: Plant) -> None:
    await shared.register("a")
    await shared.register("b", weight_bytes=6 * MIB)
    first = await shared.load("a")
    await save(shared, "a")
    shared.order(Load(model="a"))
    shared.order(Load(model="b"))
    await shared.until(lambda: shared.up("a") and shared.up("b"))
    assert {shared.up("a").pid == first.pid, shared.up("b").pid == first.pid} == {True, False}
    assert sorted(event.image is None for event in shared.of_type(InstanceUp)[-2:]) == [False, True]
    assert shared.of_type(ImageFailed) == [], "the image is not to blame"


async def test_a_restored_engine_dies_with_its_holder(house: Plant) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    up = await house.load("a")
    holder = house.record(up.instance).holder
    os.kill(holder.pid, signal.SIGKILL)
    await house.until(lambda: not house.fleet.instances)
    assert house.processes() == []


def test_the_search_for_criu_takes_no_file_that_is_not_executable(tmp_path: Path) -> None:
    place = tmp_path / "criu" / "criu"
    place.parent.mkdir()
    place.write_text("")
    assert criu.find(tmp_path) != place
    place.chmod(stat.S_IRWXU)
    assert criu.find(tmp_path) == place
