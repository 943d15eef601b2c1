"""A whole plane on a machine with a GPU that is played: only the driver and vLLM's inside are stand-ins."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.decisions.standing import leaving
from controlplane.events import InstanceFailed, ModelSetBack
from controlplane.quantities import human_bytes
from controlplane.rungs import Rung
from controlplane.subjects import NodeBeat
from pool.client import PoolClient
from tests.plane import STEP_S, PlaneUnderTest, grants_overlap, running
from tests.standin.engine import DIES_ASLEEP, HOLDS
from tests.standin.install import forget, install, uuid
from tests.standin.part import GRAPHS
from tests.standin.room import Room, Taker
from tests.standin.settings import POOL, vllm
from tests.tinymodels import tiny

MIB = 1 << 20
GPU = uuid(1)
NAMES = ("one", "two", "other")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine") / "m"


@pytest.fixture(scope="module")
def plane(machine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneUnderTest]:
    sources = tmp_path_factory.mktemp("sources")
    one, two = tiny(sources / "one", "llama", seed=1), tiny(sources / "two", "llama", seed=2)
    other = tiny(sources / "other", "qwen3", seed=3)
    settings = (
        POOL
        + '\n[pool]\nready = "48MiB"\nhelpers = false\nbeside_decoding = 0.75\n'
        + vllm("one", one)
        + vllm("two", two)
        + vllm("other", other)
    )
    with running(settings, environment=install(machine, {GPU: 128 * MIB})) as started:
        yield started
    forget([GPU])


async def test_models_swap_on_a_gpu_and_answer_as_before(plane: PlaneUnderTest, machine: Path) -> None:
    for name in NAMES:
        assert plane.cli("stop", name).returncode == 0
    first = {name: await say_alone(plane, name) for name in NAMES}
    assert len(set(first.values())) == 3, "three models, three answers"
    for name in ("two", "one", "other", "two", "one"):
        assert await say_alone(plane, name) == first[name], f"{name} is what it was"
    fleet = await plane.fleet()
    (device,) = fleet.devices.values()
    assert (device.device, device.kind, device.size_bytes) == (GPU, "gpu", 120 * MIB)
    facts = [facts for name in NAMES if (facts := fleet.models[name].facts) is not None]
    assert len({one.configuration for one in facts}) == 2, "one and two share a skeleton"
    assert len(fleet.instances) == 2
    events = await plane.events()
    assert not grants_overlap(events)
    ups: list[Any] = [one.event for one in events if one.type == "InstanceUp" and getattr(one.event, "model", "") in NAMES]
    steps = [[step.name for step in up.steps] for up in ups]
    cold = next(names for names in steps if "start_engine" in names)
    assert cold.index("take_cells") < cold.index("start_engine") < cold.index("deposit") < cold.index("attach")
    assert any("start_engine" not in names and "sleep" not in names and "attach" in names for names in steps), "a switch awake"
    assert [up.check for up in ups].count("recorded") == 3, "each weight set's answer was recorded at its first wake"
    assert {(up.graphs, up.graphs_again) for up in ups} == {(GRAPHS, 0)}, "counted at each wake and switch"


async def test_the_pool_works_as_the_settings_say(plane: PlaneUnderTest) -> None:
    await plane.inspected("one")  # all of the plane runs
    client = await PoolClient.connect(Path(plane.plane.pool_socket))
    described = await client.describe()
    await client.close()
    assert (described.budget_bytes, described.ready_limit_bytes, described.helpers) == (256 * MIB, 48 * MIB, False)
    assert described.ready_bytes <= 48 * MIB
    assert described.beside_decoding == 0.75
    words = (
        "256 MiB for weights, 48.0 MiB of it may lie ready; each GPU is filled over its own link alone; copies beside an "
        "engine that decodes keep to 75 % of their link"
    )
    assert words in plane.cli("status").stdout
    assert words in plane.cli("doctor").stdout


async def test_asleep_only_skeletons_are_left_and_the_ledger_is_the_drivers(plane: PlaneUnderTest, machine: Path) -> None:
    for name in (*NAMES, *NAMES):  # a first start takes sleepers off the GPU; then both come back
        await say_alone(plane, name)
    for name in NAMES:
        assert plane.cli("sleep", name).returncode == 0
    await plane.until_fleet(lambda fleet: all(i.rung is Rung.SLEEP for i in fleet.instances.values()), "all asleep")
    fleet, room = await plane.fleet(), Room(machine)
    asleep = sum(instance.bytes_used for instance in fleet.instances.values())
    assert asleep == len(fleet.instances) * 6 * MIB
    assert room.used(GPU) == asleep + 2 * MIB, "the skeletons', and the pool's context"
    owners = (await beat_with(plane, lambda beat: beat.owners[GPU].kv == beat.owners[GPU].pool_sets == 0)).owners[GPU]
    assert (owners.skeletons, owners.pool_context, owners.pool_sets, owners.own_weights) == (asleep, 2 * MIB, 0, 0)
    assert owners.foreign == {}
    assert {w.size_bytes for w in fleet.weights.values()} == {2 * MIB}, "the pool has all three, and the plane knows of them"


async def beat_with(plane: PlaneUnderTest, right: object) -> NodeBeat:
    async with plane.bus() as bus:
        found: asyncio.Future[NodeBeat] = asyncio.get_running_loop().create_future()

        async def heard(message: object) -> None:
            beat = msgspec.json.decode(message.data, type=NodeBeat)  # type: ignore[attr-defined]
            if not found.done() and right(beat):  # type: ignore[operator]
                found.set_result(beat)

        await bus.nc.subscribe("beat.node.*", cb=heard)
        return await asyncio.wait_for(found, STEP_S)


async def say(plane: PlaneUnderTest, name: str) -> str:
    async with plane.openai() as client:
        answer = await client.completions.create(model=name, prompt="Once upon a time", max_tokens=12, temperature=0)
    return answer.choices[0].text


async def say_alone(plane: PlaneUnderTest, name: str) -> str:
    """An engine that is at work still, by the log, would not be taken over: another would be started beside it."""
    answer = await say(plane, name)
    await plane.until_fleet(lambda fleet: not fleet.requests, "its end is in the log")
    return answer


async def test_a_skeleton_leaves_its_gpu_and_the_pool_fills_it_again_while_it_comes_back(
    plane: PlaneUnderTest, machine: Path
) -> None:
    before = await say(plane, "one")
    (up,) = [i for i in (await plane.fleet()).instances.values() if i.model == "one"]
    done = plane.cli("checkpoint", "one")
    assert done.returncode == 0, done.stderr
    fleet = await plane.fleet()
    off = fleet.instances[up.instance]
    assert (off.rung, off.bytes_used, off.grant, off.pid) == (Rung.CHECKPOINT, 0, None, up.pid)
    assert off.pid is not None
    assert not Room(machine).processes(GPU).get(off.pid), "the driver says so, too"
    assert await say(plane, "one") == before
    event = [one.event for one in await plane.events("InstanceUp")][-1]
    names = [step.name for step in event.steps]  # type: ignore[union-attr]
    assert names.index("take_cells") < min(names.index("fill"), names.index("cuda_restore"))
    assert max(names.index("fill"), names.index("cuda_restore")) < names.index("attach") < names.index("check")
    assert (await plane.fleet()).instances[up.instance].pid == up.pid


async def test_a_sleep_lets_streams_end_and_counts_when_the_driver_agrees(plane: PlaneUnderTest, machine: Path) -> None:
    """C08."""
    body = {"model": "one", "prompt": "Tell me more", "max_tokens": 200, "temperature": 0, "stream": True}
    alone = await streamed(plane, body)
    await plane.until_fleet(lambda fleet: not fleet.requests, "its end is in the log")
    before = await plane.head()
    holds = machine / HOLDS
    holds.touch()
    try:
        streams = [asyncio.create_task(streamed(plane, body)) for _ in range(8)]
        await plane.until_fleet(lambda fleet: sum(i.running for i in fleet.instances.values()) == 8, "eight run")
        sleeping = asyncio.create_task(asyncio.to_thread(plane.cli, "sleep", "one"))
        await plane.until_fleet(
            lambda fleet: [i for i in fleet.instances.values() if i.running and leaving(i)], "it is to sleep"
        )
    finally:
        holds.unlink()
    done = await sleeping
    assert done.returncode == 0, done.stderr
    assert await asyncio.gather(*streams) == [alone] * 8, "none was cut"
    await plane.until_fleet(lambda fleet: not fleet.requests, "their ends are in the log")
    kinds = [one.type for one in await plane.events(after=before)]
    assert kinds.count("RequestFinished") == 8 and not {"RequestFailed", "InstanceFailed"} & set(kinds)
    beat = await beat_with(plane, lambda beat: not beat.owners[GPU].kv)
    (asleep,) = [i for i in (await plane.fleet()).instances.values() if i.model == "one"]
    assert asleep.rung is Rung.SLEEP and Room(machine).processes(GPU)[asleep.pid or 0] == asleep.bytes_used == 6 * MIB
    assert not beat.owners[GPU].own_weights


async def test_an_engine_that_dies_of_its_sleep_is_said_to_and_who_waits_is_served_by_the_next(
    plane: PlaneUnderTest, machine: Path
) -> None:
    """C08: its answer is no proof."""
    first, before = await say(plane, "one"), await plane.head()
    dies = machine / DIES_ASLEEP
    dies.touch()
    try:
        told = await asyncio.to_thread(plane.cli, "sleep", "one")
    finally:
        dies.unlink()
    assert told.returncode != 0 and "engine_died" in told.stdout + told.stderr
    (failed,) = [one.event for one in await plane.events("InstanceFailed", after=before)]
    assert isinstance(failed, InstanceFailed)
    assert (failed.step, failed.code) == ("sleep", "engine_died")
    assert await say(plane, "one") == first
    assert not await plane.events("RequestFailed", after=before)


async def streamed(plane: PlaneUnderTest, body: dict[str, object]) -> str:
    async with plane.rest() as client, client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line.startswith("data: {")]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


async def test_a_wake_that_finds_no_room_goes_back_to_a_clean_sleep_and_waits_until_others_have_gone(
    plane: PlaneUnderTest, machine: Path
) -> None:
    """C16. The memory is taken when the wake has been decided: the worker stands still until then."""
    first = await say(plane, "one")
    for name in NAMES:
        assert plane.cli("sleep", name).returncode == 0
    sleepers = await plane.until_fleet(
        lambda fleet: (
            all(i.rung in {Rung.SLEEP, Rung.CHECKPOINT} for i in fleet.instances.values())
            and {name for name, i in fleet.instances.items() if i.rung is Rung.SLEEP}
        ),
        "all asleep",
    )
    pids = {i.pid for i in (await plane.fleet()).instances.values()}
    room, before, worker = Room(machine), await plane.head(), plane.child("worker")
    stranger = Taker(room, GPU)
    await beat_with(plane, lambda _: True)
    plane.kill(worker, signal.SIGSTOP)  # just after a beat: once it has been silent for three seconds no wake is decided
    try:
        asked = asyncio.create_task(say(plane, "one"))
        await plane.until_fleet(lambda fleet: fleet.grants, "the wake is decided")
        stranger.take(room.free(GPU) - 4 * MIB)
    finally:
        plane.kill(worker, signal.SIGCONT)
    await plane.until_fleet(
        lambda fleet: [r for r in fleet.requests.values() if r.code == "foreign_memory"], "it waits for others' memory"
    )
    (told,) = [one.event for one in await plane.events("ModelSetBack", after=before)]
    assert isinstance(told, ModelSetBack)
    assert re.search(r"needs 2\.0 MiB on \S+, [\d.]+ \w+ are free there", told.message)
    assert f"process {os.getpid()} has {human_bytes(stranger.size)}" in told.message
    assert "its skeleton sleeps on" in told.message
    assert len(await plane.events("InstanceSlept", after=before)) == 1, "and it was not tried again before they had gone"
    fleet = await plane.fleet()
    assert {name for name, i in fleet.instances.items() if i.rung is Rung.SLEEP} == sleepers
    assert {i.pid for i in fleet.instances.values()} == pids, "no engine was ended for it"
    assert not fleet.grants
    assert not await plane.events("InstanceFailed", after=before)
    assert room.used(GPU) == len(sleepers) * 6 * MIB + 2 * MIB + stranger.size
    stranger.give(stranger.size)
    assert await asked == first, "with nobody's help"


async def test_others_memory_is_shown_with_its_owner_and_keeps_engines_from_being_started_into_it(
    plane: PlaneUnderTest, machine: Path
) -> None:
    """C16: seen beforehand this time."""
    for name in NAMES:
        plane.cli("stop", name)
    await plane.until_fleet(lambda fleet: not fleet.instances, "all gone")
    room, before = Room(machine), await plane.head()
    stranger = Taker(room, GPU)
    stranger.take(room.free(GPU) - 10 * MIB)
    await plane.until_fleet(lambda fleet: fleet.devices[GPU].foreign_bytes == stranger.size, "it counts")
    asked = asyncio.create_task(say(plane, "other"))
    (waiter,) = await plane.until_fleet(
        lambda fleet: [r for r in fleet.requests.values() if r.code == "foreign_memory"], "it waits for others' memory"
    )
    assert re.search(
        rf"needs [\d.]+ MiB of gpu0, and [\d.]+ \w+ of its 120 MiB are left .* pid {os.getpid()} \(", waiter.reason
    )
    assert not await plane.events("InstanceDirected", after=before), "no engine was started to find that out"
    async with plane.rest() as client:

        async def devices() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await client.get("/api/devices")).json()
            return found if all(one["foreign"] and one["owners"]["foreign"] for one in found) else []

        (shown,) = await plane.until(devices, "web has seen the event and a beat with it")
        page = (await client.get("/")).text
        refused = await client.post(
            "/v1/completions", json={"model": "other", "prompt": "x"}, headers={"prefer": "wait=0"}, timeout=20
        )
    assert [(one["pid"], one["size_bytes"]) for one in shown["foreign"]] == [(os.getpid(), stranger.size)]
    assert shown["owners"]["foreign"] == {str(os.getpid()): stranger.size}
    assert f"not this plane&#39;s (pid {os.getpid()}" in page
    assert refused.status_code == 503 and f"pid {os.getpid()}" in refused.text and int(refused.headers["retry-after"]) >= 1
    assert f"pid {os.getpid()}" in plane.cli("status").stdout
    stranger.give(stranger.size)
    assert await asked
    assert not (await plane.fleet()).devices[GPU].foreign
    assert [one.type for one in await plane.events(after=before) if "Foreign" in one.type] == [
        "ForeignMemoryFound", "ForeignMemoryGone"
    ]  # fmt: skip


async def test_a_model_that_drafts_is_part_of_what_it_drafts_for_whatever_becomes_of_its_files(
    plane: PlaneUnderTest, tmp_path: Path
) -> None:
    for name in NAMES:
        plane.cli("stop", name)
    source = (await plane.fleet()).models["one"].spec.source
    draft = tiny(tmp_path / "draft", "llama", seed=7, num_hidden_layers=1)
    fields = {
        "source": source, "engine": "vllm", "share": "1/2",
        "arguments": {"max_model_len": 256, "kv_bytes": "16MiB", "draft_model": str(draft), "num_speculative_tokens": 2},
    }  # fmt: skip
    async with plane.rest() as client:
        added = await client.post("/api/models", json={"name": "drafted", **fields})
        assert added.status_code < 300, added.text
        await plane.inspected("drafted")
        await plane.seen()
        page = (await client.get("/models/drafted")).text
        gone = {"draft_model": str(tmp_path / "gone")}
        assert (await client.post("/api/models", json={"name": "lost", **fields, "arguments": gone})).status_code < 300
    assert f"draft_model = {draft}" in page
    assert "num_speculative_tokens = 2" in page
    (lost,) = await plane.until_fleet(
        lambda fleet: [m for m in fleet.models.values() if m.model == "lost" and m.set_back], "one without is refused"
    )
    assert lost.set_back is not None
    assert lost.set_back.message.startswith(f"the draft_model of lost can't be opened ({tmp_path / 'gone'}): No such file")
    first = await say(plane, "drafted")
    other = tiny(tmp_path / "other", "llama", seed=8, num_hidden_layers=1)
    (draft / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    assert plane.cli("stop", "drafted").returncode == 0
    assert await say(plane, "drafted") == first, "a new engine, and the draft that was inspected"
    async with plane.rest() as client:
        assert (await client.post("/api/models", json={"name": "redrafted", **fields})).status_code < 300
    await plane.inspected("redrafted")
    assert await say(plane, "redrafted") != first, "its draft's bytes are among those that are mapped"
    facts = {name: model.facts for name, model in (await plane.fleet()).models.items()}
    alone, drafted, again = facts["one"], facts["drafted"], facts["redrafted"]
    assert alone is not None and drafted is not None and again is not None
    assert len({alone.configuration, drafted.configuration, again.configuration}) == 3
    assert drafted.weight_bytes == again.weight_bytes > alone.weight_bytes
    assert plane.cli("stop", "redrafted").returncode == 0
    models = Path(plane.plane.data) / "models"
    assert len(list(models.glob("drafts-*"))) == 2
    for name, left in (("drafted", 1), ("redrafted", 0)):
        assert plane.cli("models", "rm", name).returncode == 0
        await plane.until(partial(_copies, models, left), "no copy is kept for nobody")


async def _copies(models: Path, number: int) -> bool:
    return len(list(models.glob("drafts-*"))) == number
