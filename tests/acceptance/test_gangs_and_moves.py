"""A model over two devices, and a live one that goes from one device to another: a whole plane, the fake engine."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from compose.process import Identity
from controlplane.events import GrantGiven, GrantReturned, InstanceUp
from controlplane.fleet import Fleet
from controlplane.rungs import Rung
from tests.plane import NODE, PlaneUnderTest, fake, grants_overlap, running
from worker.processes import in_session

PAIR = fake("pair", weight_bytes=2 << 20, tokens_per_s=100).replace("share = 1", "share = { gpus = 2 }")
LAME = fake("lame", fail="rank_wake:1").replace("share = 1", "share = { gpus = 2 }")
LOOSE = fake("loose", gpu=True, gang_checkpoint=True).replace("share = 1", "share = { gpus = 2 }")
MOVERS = fake("one", share=0.5, tokens_per_s=100) + fake("card", share=0.5, tokens_per_s=100, gpu=True)
SETTINGS = NODE + PAIR + LAME + LOOSE + MOVERS + fake("whole", kv_bytes=2 << 20)
TEXT = "a stream that must not lose a letter, nor say one twice; " * 2
LONG = TEXT * 4
"""Five seconds of it."""


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneUnderTest]:
    with running(SETTINGS) as started:
        yield started


async def test_a_gang_takes_every_device_and_gives_them_back_as_one(plane: PlaneUnderTest) -> None:
    answer = await plane.chat("pair", TEXT)
    assert TEXT in answer
    instance = await plane.serving("pair")
    fleet = await plane.fleet()
    assert len(instance.devices) == len(instance.grants) == 2
    assert {fleet.grants[number].device for number in instance.grants} == set(fleet.devices)
    locks = {path.name.rpartition(".")[0] for path in (plane.data / "run" / "locks").iterdir()}
    assert set(fleet.devices) <= locks
    assert plane.cli("sleep", "pair").returncode == 0
    assert not (await plane.fleet()).grants
    assert await plane.chat("pair", TEXT) == answer, "the same after a sleep"
    assert (await plane.serving("pair")).instance == instance.instance, "the sleeping gang was woken"


async def test_a_gang_that_was_taken_off_its_devices_is_brought_back_by_the_next_worker(plane: PlaneUnderTest) -> None:
    answer = await plane.chat("loose", TEXT)
    instance = await plane.serving("loose")
    engine = plane.part(instance.instance, "engine")
    ranks = {one.pid for one in in_session(engine.pid)} - {engine.pid}
    told = plane.cli("checkpoint", "loose")
    assert told.returncode == 0, told.stderr
    assert not (await plane.fleet()).grants
    assert {_letter(pid) for pid in ranks} == {"T"}, "off their devices all of them stand still"
    hellos = len(await plane.events("NodeJoined"))
    plane.kill(plane.child("worker"))

    async def back() -> bool:
        return len(await plane.events("NodeJoined")) > hellos

    await plane.until(back, "the next worker says hello")
    assert await plane.chat("loose", TEXT) == answer
    assert (await plane.serving("loose")).instance == instance.instance
    assert {one.pid for one in in_session(engine.pid)} == {engine.pid, *ranks}, "the same processes"
    up = (await plane.events("InstanceUp"))[-1].event
    assert isinstance(up, InstanceUp)
    assert [step.name for step in up.steps if step.name in ("take_cells", "cuda_restore", "attach", "wake", "serve")] == [
        "take_cells", "cuda_restore", "attach", "wake", "serve",
    ]  # fmt: skip


def _letter(pid: int) -> str:
    """Of the process's state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_killed_rank_is_one_failure_and_everything_is_back(plane: PlaneUnderTest) -> None:  # N7
    await plane.chat("pair", "hello")
    instance = await plane.serving("pair")
    engine = plane.part(instance.instance, "engine")
    ranks = [one for one in in_session(engine.pid) if one.pid != engine.pid]
    assert len(ranks) == 2
    others = [found for one in ranks if (found := Identity.of(one.pid)) is not None]
    pieces: list[str] = []
    with pytest.raises(openai.APIError, match="engine's process died"):
        await _stream_and_kill(plane, pieces, others)
    assert said(LONG).startswith("".join(pieces))
    await plane.until_fleet(lambda fleet: instance.instance not in fleet.instances, "the gang has failed")
    assert not [g for g in (await plane.fleet()).grants.values() if g.instance == instance.instance]
    assert await engine.ended(30)
    for left in others:
        assert await left.ended(30), "no rank outlives its gang"
    assert await plane.chat("pair", "hello") == said("hello")


async def _stream_and_kill(plane: PlaneUnderTest, pieces: list[str], ranks: list[Identity]) -> None:
    """Take one of the ranks as soon as the stream has begun."""
    async with plane.openai() as client:
        stream = await client.chat.completions.create(model="pair", messages=[{"role": "user", "content": LONG}], stream=True)
        async for chunk in stream:
            pieces.append((chunk.choices[0].delta.content or "") if chunk.choices else "")
            if len("".join(pieces)) > 5 and len(ranks) == 2:
                os.kill(ranks.pop().pid, signal.SIGKILL)


async def test_a_rank_killed_asleep_is_seen_and_the_next_request_starts_a_new_gang(plane: PlaneUnderTest) -> None:  # N7
    expected = await plane.chat("pair", TEXT)
    instance = await plane.serving("pair")
    assert plane.cli("sleep", "pair").returncode == 0
    engine = plane.part(instance.instance, "engine")
    rank = max(one.pid for one in in_session(engine.pid) if one.pid != engine.pid)
    os.kill(rank, signal.SIGKILL)
    await plane.until_fleet(lambda fleet: instance.instance not in fleet.instances, "the gang has failed")
    assert await engine.ended(30)
    assert await plane.chat("pair", TEXT) == expected


async def test_a_rank_that_cannot_wake_fails_the_climb_and_the_next_one_serves(plane: PlaneUnderTest) -> None:
    assert await plane.chat("lame", "hello")
    failed = [one.event for one in await plane.events("InstanceFailed")]
    assert any("rank 0 of 2" in getattr(event, "message", "") for event in failed)


def said(text: str) -> str:
    """What the fake engine answers."""
    return f"You said: user: {text}\nassistant: "


async def test_a_live_model_moves_and_who_comes_meanwhile_is_served(plane: PlaneUnderTest) -> None:
    for name in ("pair", "lame"):
        assert plane.cli("stop", name).returncode == 0
    assert await plane.chat("one", "hello") == said("hello")
    before, fleet = await plane.serving("one"), await plane.fleet()
    target = next(device for device in fleet.devices.values() if device.device != before.device)
    head = await plane.head()
    moves = asyncio.Event()

    async def talk() -> set[str]:
        """Again and again until it moves, however long the command line takes to start."""
        answers = set[str]()
        while not moves.is_set():
            answers.add(await plane.chat("one", LONG))
        return answers

    before_it = [asyncio.create_task(talk()) for _ in range(3)]
    await plane.until_fleet(lambda f: any(i.running for i in f.instances.values()), "it runs")
    moving = asyncio.create_task(asyncio.to_thread(plane.cli, "move", "one", "--to", target.name))
    await plane.until_fleet(lambda f: any(i.moving_to for i in f.instances.values()) or moving.done(), "it moves")
    moves.set()
    assert not moving.done(), moving.result().stderr
    meanwhile = [asyncio.create_task(plane.chat("one", LONG)) for _ in range(3)]
    moved = await moving
    assert moved.returncode == 0, moved.stderr
    assert f"serves on {target.name}" in moved.stdout
    answers = set[str]().union(*await asyncio.gather(*before_it), await asyncio.gather(*meanwhile))
    assert answers == {said(LONG)}, "none lost, none cut"
    after = await plane.serving("one")
    assert (after.instance, after.device, after.moving_to) == (before.instance, target.device, None)
    told = [one.event for one in await plane.events("GrantGiven", "GrantReturned", "InstanceUp", after=head)]
    assert [type(event) for event in told] == [GrantGiven, InstanceUp, GrantReturned], "the new place first, the old one last"
    up = told[1]
    assert isinstance(up, InstanceUp)
    assert {"drain", "sleep", "detach", "verify", "drop_cells", "take_cells", "attach", "wake"} <= {s.name for s in up.steps}


async def test_a_move_goes_on_after_the_workers_death(plane: PlaneUnderTest) -> None:
    expected = await plane.chat("one", TEXT)
    before, fleet = await plane.serving("one"), await plane.fleet()
    target = next(device for device in fleet.devices.values() if device.device != before.device)
    stream = asyncio.create_task(plane.chat("one", TEXT))
    await plane.until_fleet(lambda f: any(i.running for i in f.instances.values()), "it runs")
    assert plane.cli("move", "one", "--to", target.name, "--no-wait").returncode == 0
    plane.kill(plane.child("worker"))

    def arrived(fleet: Fleet) -> bool:
        known = fleet.instances.get(before.instance)
        return known is not None and known.device == target.device and known.directive_settled

    await plane.until_fleet(arrived, "it has moved")
    assert await stream == expected
    assert await plane.chat("one", TEXT) == expected


async def test_what_holds_a_gpu_is_taken_off_it_on_the_way(plane: PlaneUnderTest) -> None:
    expected = await plane.chat("card", TEXT)
    before, fleet = await plane.serving("card"), await plane.fleet()
    target = next(device for device in fleet.devices.values() if device.device != before.device)
    engine, head = plane.part(before.instance, "engine"), await plane.head()
    assert plane.cli("move", before.instance, "--to", target.device).returncode == 0
    after = await plane.serving("card")
    assert (after.instance, after.device) == (before.instance, target.device)
    assert engine.alive, "the same process"
    (up,) = [one.event for one in await plane.events("InstanceUp", after=head)]
    assert isinstance(up, InstanceUp)
    names = [step.name for step in up.steps]
    order = ["sleep", "detach", "verify", "checkpoint", "drop_cells", "take_cells", "cuda_restore", "attach", "wake", "serve"]
    assert [name for name in names if name in order] == order
    assert await plane.chat("card", TEXT) == expected


@pytest.mark.parametrize("model", ["one", "card"])
async def test_a_sleeper_whose_place_is_taken_comes_up_where_there_is_one(plane: PlaneUnderTest, model: str) -> None:
    for name in ("pair", "lame", "loose", "one", "card", "whole"):
        plane.cli("stop", name)
    await plane.until_fleet(lambda f: not f.instances, "nothing is left")
    expected = await plane.chat(model, TEXT)
    before = await plane.serving(model)
    assert plane.cli("sleep", model).returncode == 0
    await plane.chat("whole", "hello")
    other = await plane.serving("whole")
    if other.device != before.device:
        assert plane.cli("move", "whole", "--to", before.device or "").returncode == 0
    engine, head = plane.part(before.instance, "engine"), await plane.head()
    assert await plane.chat(model, TEXT) == expected
    after = await plane.serving(model)
    assert after.instance == before.instance
    assert after.device != before.device
    assert engine.alive, "the same process"
    (up,) = [one.event for one in await plane.events("InstanceUp", after=head)]
    assert isinstance(up, InstanceUp)
    assert ("cuda_restore" in {step.name for step in up.steps}) == (model == "card")


async def test_moves_that_cannot_be_are_refused_with_a_reason(plane: PlaneUnderTest) -> None:
    await plane.chat("one", "hello")
    instance = await plane.serving("one")
    here = (await plane.fleet()).devices[instance.device or ""].name
    async with plane.rest() as rest:
        codes = []
        for path, device in (("models/one", here), ("models/one", "nowhere"), (f"instances/{instance.instance}", here)):
            answer = await rest.post(f"/api/{path}/move", json={"device": device})
            codes.append((answer.status_code, answer.json()["code"]))
    assert codes == [(409, "already_there"), (404, "device_unknown"), (409, "already_there")]


async def test_the_page_shows_a_gang_across_its_devices(plane: PlaneUnderTest) -> None:
    await plane.chat("pair", "hello")
    async with plane.rest() as rest:
        await plane.seen()
        page = (await rest.get("/")).text
        devices = (await rest.get("/api/devices")).json()
    assert "rank 0 of 2" in page
    assert "rank 1 of 2" in page
    assert [len(one["grants"]) for one in (devices["devices"] if isinstance(devices, dict) else devices)] == [1, 1], json.dumps(
        devices
    )


async def test_in_the_end_the_log_agrees_with_itself(plane: PlaneUnderTest) -> None:
    audit = plane.cli("audit")
    assert audit.returncode == 0, audit.stdout
    assert not grants_overlap(await plane.events())
    assert all(i.rung in (Rung.UP, Rung.SLEEP) for i in (await plane.fleet()).instances.values())
