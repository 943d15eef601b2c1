"""Engines on disk, on a whole plane: saved and restored through REST, CLI and the page's own data; refused by name."""

import json

import pytest

from controlplane.rungs import Rung
from tests.plane import NODE, PlaneUnderTest, fake, running

SETTINGS = NODE + fake("a", share="1/2") + fake("b", share="1/2", idle='{ sleep = "1s", saved = "1s", cold = "never" }')


@pytest.fixture(scope="module")
def house():
    with running(SETTINGS) as plane:
        found = json.loads(plane.cli("doctor", "--json").stdout)
        ladder = next(check for check in found if check["name"] == "ladder")
        if "saved, cold" not in ladder["found"]:
            pytest.skip(f"engines can't be saved here: {ladder['found']}")
        yield plane


async def test_a_model_is_saved_and_restored_by_the_next_request(house: PlaneUnderTest) -> None:
    await house.inspected("a", "b")
    before = await house.chat("a", "the same as ever")
    done = house.cli("save", "a")
    assert done.returncode == 0, done.stderr
    fleet = await house.fleet()
    saved = next(i for i in fleet.instances.values() if i.model == "a")
    assert saved.rung is Rung.SAVED
    assert await house.chat("a", "the same as ever") == before
    up = [event.event for event in await house.events("InstanceUp")][-1]
    assert up.image == saved.image
    assert up.check == "same_tokens"


async def test_images_are_listed_checked_and_removed(house: PlaneUnderTest) -> None:
    (shown,) = json.loads(house.cli("images", "--json").stdout)
    assert (shown["state"], shown["proof"]) == ("ok", "same_tokens")
    assert "a" in shown["models"]
    assert json.loads(house.cli("images", "inspect", shown["image"]).stdout)["image"] == shown["image"]
    checked = house.cli("images", "verify", shown["image"])
    assert checked.returncode == 0 and "as written" in checked.stdout, checked.stderr
    pages = house.data / "images" / shown["image"] / "pages-1.img"
    with pages.open("r+b") as file:
        file.write(b"\x01")
    bad = house.cli("images", "verify", shown["image"])
    assert bad.returncode == 1 and "image_corrupt" in bad.stderr
    assert house.cli("images", "gc").returncode == 0
    assert house.cli("images", "rm", shown["image"]).returncode == 0

    async def none_left() -> bool:
        return not (await house.fleet()).images

    await house.until(none_left, "the image is gone")
    async with house.rest() as http:
        assert (await http.get(f"/api/images/{shown['image']}")).json()["code"] == "image_unknown"


async def test_what_idles_goes_to_sleep_then_to_disk(house: PlaneUnderTest) -> None:
    await house.chat("b", "once")
    await house.until_fleet(
        lambda fleet: any(i.model == "b" and i.rung is Rung.SAVED for i in fleet.instances.values()), "b is saved"
    )
    assert await house.chat("b", "again") == (await house.chat("b", "again"))


async def test_a_checkpoint_is_refused_by_name(house: PlaneUnderTest) -> None:
    async with house.rest() as http:
        answer = await http.post("/api/models/a/checkpoint")
    assert answer.json()["code"] == "not_available"
    assert "CUDA" in answer.json()["message"]


async def test_a_saved_model_survives_the_whole_plane(house: PlaneUnderTest) -> None:
    before = await house.chat("a", "tomorrow")
    assert house.cli("save", "a").returncode == 0
    assert house.down() == 0
    house.start()
    assert await house.chat("a", "tomorrow") == before
    assert [event.event for event in await house.events("InstanceUp")][-1].image is not None
