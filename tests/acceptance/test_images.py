"""Engines on disk, on a whole plane: saved and restored through REST, CLI and the page's own data; refused by name."""

import json
from pathlib import Path

import pytest

from controlplane.rungs import Rung
from tests.acceptance.test_transformers import NODE as ROOMY
from tests.acceptance.test_transformers import model, say
from tests.plane import NODE, PlaneUnderTest, fake, running
from tests.tinymodels import tiny

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
    up = [event.event for event in await house.events("InstanceUp") if event.event.model == "a"][-1]
    assert up.image == saved.image
    assert up.check == "same_tokens"


async def test_images_are_listed_checked_and_removed(house: PlaneUnderTest) -> None:
    await house.inspected("a", "b")
    before = await house.chat("a", "proved")
    assert house.cli("save", "a").returncode == 0
    assert await house.chat("a", "proved") == before
    await house.seen()
    (shown,) = json.loads(house.cli("images", "--json").stdout)
    assert (shown["state"], shown["proof"]) == ("ok", "same_tokens")
    assert "a" in shown["models"]
    assert json.loads(house.cli("images", "inspect", shown["image"], "--json").stdout)["image"] == shown["image"]
    checked = house.cli("images", "verify", shown["image"])
    assert checked.returncode == 0 and "as written" in checked.stdout, checked.stderr
    pages = house.data / "images" / shown["image"] / "pages-1.img"
    with pages.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    bad = house.cli("images", "verify", shown["image"])
    assert bad.returncode == 1 and "image_corrupt" in bad.stderr
    async with house.rest() as http:
        press = f"/images/{shown['image']}/operations"
        found = await http.post(press, data={"verb": "verify"}, headers={"hx-request": "true"})
        assert found.status_code == 409 and "image_corrupt" in found.text, "the page's button asks the node too"
        pinned = await http.post(press, data={"verb": "pin"}, headers={"hx-request": "true"})
        assert pinned.status_code == 200 and "pin requested" in pinned.text
        foreign = await http.post(press, data={"verb": "remove"}, headers={"authorization": ""})
        assert foreign.status_code == 401, "nobody presses it unknown"
    assert house.cli("images", "pin", shown["image"]).returncode == 0
    await house.seen()
    assert "nothing" in house.cli("images", "gc").stdout
    assert "ok, pinned" in house.cli("images").stdout
    let_go = house.cli("images", "unpin", shown["image"])
    assert (let_go.returncode, let_go.stdout) == (0, f"{shown['image']} may go\n")
    removed = house.cli("images", "rm", shown["image"])
    assert removed.returncode == 0 and "removed" in removed.stdout, removed.stderr
    told = (await house.events("ImageDismissed"))[-1]
    assert told.actor.startswith("operator:") or told.actor.startswith("token:"), "who asked is on record"
    gone = (await house.events("ImageRemoved"))[-1].event
    assert gone.by == told.actor
    unknown = house.cli("images", "rm", shown["image"])
    assert unknown.returncode == 1 and "image_unknown" in unknown.stderr

    async def none_left() -> bool:
        return not (await house.fleet()).images

    await house.until(none_left, "the image is gone")
    await house.seen()
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
    assert "GPU" in answer.json()["message"]
    assert answer.json()["details"]["reason"] == "no_cuda"


async def test_a_saved_model_survives_the_whole_plane(house: PlaneUnderTest) -> None:
    before = await house.chat("a", "tomorrow")
    assert house.cli("save", "a").returncode == 0
    assert house.down() == 0
    house.start()
    assert await house.chat("a", "tomorrow") == before
    assert [event.event for event in await house.events("InstanceUp") if event.event.model == "a"][-1].image is not None


@pytest.mark.timeout(240)
async def test_real_models_come_back_from_one_image_with_the_same_tokens(house: PlaneUnderTest, tmp_path: Path) -> None:
    one, two = tiny(tmp_path / "one", "llama", seed=1), tiny(tmp_path / "two", "llama", seed=2)
    with running(ROOMY + model("one", one) + model("two", two)) as plane:
        first = {name: await say(plane, name) for name in ("one", "two")}
        marker = "a marker of somebody who called"
        async with plane.openai() as client:
            await client.completions.create(model="one", prompt=f"{marker} {marker}", max_tokens=4)
        for turn in range(3):
            for name in first:
                saved = plane.cli("save", name)
                assert saved.returncode == 0, saved.stderr
            assert not (await plane.fleet()).grants
            if turn == 1:
                plane.kill(plane.child("worker"))
            for name, text in first.items():
                assert await say(plane, name) == text
        built = await plane.events("ImageBuilt")
        assert len(built) == 1, "two models, one skeleton, one image"
        ups = [event.event for event in await plane.events("InstanceUp")]
        assert sum(event.image is not None for event in ups) >= 3
        (image,) = (plane.data / "images").iterdir()
        assert marker.encode() not in (image / "pages-1.img").read_bytes()
