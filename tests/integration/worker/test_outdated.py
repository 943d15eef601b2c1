"""Engines that outlive an upgrade of the product, with a real CRIU: no image says that it is of code that is not in it."""

from pathlib import Path

import pytest

from controlplane.commands import Load, Save, Sleep, Stop, Tick
from controlplane.events import ImageBuilt, ImageFailed, InstanceFailed, InstanceUp, OperationFailed
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from controlplane.spec import Idle
from tests.imagehouse import manifest, save, save_one, says
from tests.workshop import Plant
from worker.images import facts, steps

pytestmark = pytest.mark.timeout(120)


async def upgrade(plane: Plant, monkeypatch: pytest.MonkeyPatch, code: str = "newer") -> None:
    """Other files, and a worker of them; holders, engines and frontends go on."""
    monkeypatch.setattr(facts, "code_on_disk", lambda: code)
    monkeypatch.setattr(facts, "our_code", lambda: code)
    await plane.restart_worker()


async def refused(plane: Plant) -> OperationFailed:
    """Ask for a save of model `a` that is refused: its engine sleeps on as it was, and no image is blamed, or left."""
    before = plane.only()
    plane.order(Save(model="a"))
    failed: OperationFailed = (await plane.until(lambda: plane.of_type(OperationFailed)))[-1]
    await plane.until(lambda: plane.only().directive_settled)
    asleep = plane.only()
    assert (asleep.rung, asleep.pid, asleep.unsaved and asleep.unsaved.code) == (Rung.SLEEP, before.pid, "engine_outdated")
    assert (failed.code, "stop it and load it again" in failed.message) == ("engine_outdated", True)
    assert not plane.fleet.grants and not plane.of_type(InstanceFailed) and not plane.of_type(ImageFailed)
    assert not [path for path in images(plane) if path.name.endswith(".draft")]
    return failed


def images(plane: Plant) -> list[Path]:
    place = plane.data / "images"
    return list(place.iterdir()) if place.is_dir() else []


async def test_what_another_version_has_started_is_not_saved_as_this_ones(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("a")
    first = await house.load("a")
    await upgrade(house, monkeypatch)
    failed = await refused(house)
    assert "newer" in failed.message
    assert images(house) == []
    with pytest.raises(Refused) as again:
        house.order(Save(model="a"))
    assert (again.value.code, again.value.details["reason"]) == (Code.NOT_AVAILABLE, "engine_outdated")
    up = await house.load("a")
    assert up.pid == first.pid, "it serves as before"
    assert await says(house, up, "hello") == "You said: hello"
    house.order(Stop(model="a"))
    await house.until(lambda: not house.fleet.instances)
    await house.load("a")
    await save(house, "a")
    assert manifest(house)[1].fingerprint.engine.endswith(" newer")


async def test_what_changes_between_the_look_and_the_writing_is_seen_as_well(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("a")
    await house.load("a")
    await upgrade(house, monkeypatch)
    monkeypatch.setattr(steps, "outdated", lambda *_: "")
    await refused(house)
    assert images(house) == []


async def test_an_idle_one_is_tried_once_and_sleeps_on_while_that_process_lives(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("a", idle=Idle(sleep_ms=1, saved_ms=1))
    first = await house.load("a")
    await upgrade(house, monkeypatch)
    await house.until(lambda: house.order(Tick()) and house.only().unsaved)
    up = await house.load("a")
    assert (up.pid, up.unsaved and up.unsaved.code) == (first.pid, "engine_outdated")
    house.order(Sleep(model="a"))
    await house.until(lambda: house.only().rung is Rung.SLEEP and house.only().directive_settled)
    seen = len(house.events)
    for _ in range(5):
        house.order(Tick())
    assert len(house.events) == seen
    assert not house.of_type(InstanceFailed) and not house.of_type(ImageFailed) and images(house) == []


async def test_what_nobody_has_written_down_counts_as_another_version(house: Plant) -> None:
    await house.register("a")
    up = await house.load("a")
    assert house.record(up.instance).started is not None
    house.directory(up.instance).edit(started=None)
    failed = await refused(house)
    assert "did not write down" in failed.message


async def test_what_came_back_from_an_image_is_of_the_images_version(house: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    up = await house.load("a")
    assert house.of_type(InstanceUp)[-1].image == path.name
    assert house.record(up.instance).started == made.fingerprint
    await upgrade(house, monkeypatch)
    await refused(house)
    assert len(house.of_type(ImageBuilt)) == 1


async def test_files_that_are_replaced_under_a_worker_are_what_its_next_engine_is_of(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "code_on_disk", lambda: "newer")
    await house.register("a")
    up = await house.load("a")
    started = house.record(up.instance).started
    assert started is not None and started.engine.endswith(" newer")
    await refused(house)
    monkeypatch.setattr(facts, "our_code", lambda: "newer")
    await house.restart_worker()
    await save_one(house, "a")
    assert manifest(house)[1].fingerprint == started


async def test_an_outdated_one_ends_where_todays_image_of_its_configuration_is_there(
    house: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.register("a")
    await house.register("b")
    await house.load("a")
    await upgrade(house, monkeypatch)
    request, _ = house.admit("a")
    house.order(Load(model="b"))
    await house.until(lambda: house.up("b"))
    house.end(request)
    assert len(house.fleet.instances) == 2
    await save_one(house, "b")
    saved = await save_one(house, "a")
    assert (saved.image, len(house.of_type(ImageBuilt))) == (manifest(house)[0].name, 1)
    assert house.processes() == []
    assert await says(house, await house.load("a"), "today's") == "You said: today's"
