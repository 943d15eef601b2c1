"""A whole plane on a machine with two GPUs that are played: a gang over both, and a live model that goes from one to the other.

As in `test_gpu_plane`, only the driver and vLLM's inside are stand-ins: ranks are processes, each with a set of its own.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.process import Identity
from controlplane.events import InstanceFailed, InstanceUp
from controlplane.fleet import Instance
from controlplane.rungs import Activity
from tests.plane import PlaneUnderTest, grants_overlap, running
from tests.standin.engine import CLINGS, SHARES
from tests.standin.install import forget, install, uuid
from tests.standin.part import GRAPHS, STRANDS
from tests.standin.room import Room
from tests.standin.settings import POOL, vllm
from tests.tinymodels import tiny
from worker.agent import DEADLINES
from worker.processes import in_session

MIB = 1 << 20
GPUS = (uuid(1), uuid(2))
CONTEXT = 2 * MIB


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine") / "m"


@pytest.fixture(scope="module")
def plane(machine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneUnderTest]:
    sources = tmp_path_factory.mktemp("sources")
    pair, solo = tiny(sources / "pair", "llama", seed=1), tiny(sources / "solo", "qwen3", seed=2)
    settings = POOL + vllm("pair", pair, "{ gpus = 2 }", more=", gang_checkpoint = true") + vllm("solo", solo)
    environment = install(machine, dict.fromkeys(GPUS, 128 * MIB))
    with running(settings, environment={**environment, DEADLINES: '{"attach": 8, "cuda_restore": 15}'}) as started:
        yield started
    forget(GPUS)


async def say(plane: PlaneUnderTest, name: str, tokens: int = 12) -> str:
    async with plane.openai() as client:
        answer = await client.completions.create(model=name, prompt="Once upon a time", max_tokens=tokens, temperature=0)
    return answer.choices[0].text


async def _pair(plane: PlaneUnderTest) -> tuple[Instance, Identity, list[Identity]]:
    """The gang that is up, its engine's own process, and those of its ranks."""
    instance = await plane.serving("pair")
    engine = plane.part(instance.instance, "engine")
    ranks = [found for one in in_session(engine.pid) if one.pid != engine.pid and (found := Identity.of(one.pid))]
    return instance, engine, ranks


async def test_each_rank_of_a_gang_has_a_set_of_its_own_on_its_own_gpu(plane: PlaneUnderTest, machine: Path) -> None:
    for name in ("pair", "solo"):
        assert plane.cli("stop", name).returncode == 0
    before = await plane.head()
    first = await say(plane, "pair")
    instance = await plane.serving("pair")
    fleet = await plane.fleet()
    assert set(instance.devices) == set(GPUS)
    assert len((instance.weight_set or "").split("+")) == 2, "each has read a part"
    assert {fleet.grants[number].device for number in instance.grants} == set(GPUS)
    engine = plane.part(instance.instance, "engine")
    ranks = {one.pid for one in in_session(engine.pid)} - {engine.pid}
    room = Room(machine)
    pids = {pid for gpu in GPUS for pid in room.processes(gpu)}
    assert pids == {*ranks, plane.child("pool").pid}, "who computes nothing has nothing"
    assert plane.cli("sleep", "pair").returncode == 0
    assert [room.used(gpu) for gpu in GPUS] == [CONTEXT + 6 * MIB] * 2, "the skeletons' of both ranks"
    assert await say(plane, "pair") == first
    ups = [one.event for one in await plane.events("InstanceUp", after=before)]
    assert [(up.graphs, up.graphs_again) for up in ups if isinstance(up, InstanceUp)] == [(2 * GRAPHS, 0)] * 2
    assert (await plane.serving("pair")).instance == instance.instance, "woken"


async def test_a_gang_is_taken_off_its_gpus_and_comes_back_with_its_communicators_and_graphs_made_anew(
    plane: PlaneUnderTest, machine: Path
) -> None:
    assert plane.cli("stop", "solo").returncode == 0
    first, before = await say(plane, "pair"), await plane.head()
    instance = await plane.serving("pair")
    ranks = in_session(plane.part(instance.instance, "engine").pid)
    there, room = {one.pid for one in ranks}, Room(machine)
    for again in (1, 2):
        told = plane.cli("checkpoint", "pair")
        assert told.returncode == 0, told.stderr
        assert [room.used(gpu) for gpu in GPUS] == [CONTEXT] * 2, "nothing of it is on either"
        assert await say(plane, "solo"), "its GPUs are others'"
        assert plane.cli("stop", "solo").returncode == 0
        assert await say(plane, "pair") == first
        up = (await plane.events("InstanceUp"))[-1].event
        assert isinstance(up, InstanceUp) and (up.instance, up.check) == (instance.instance, "same_tokens")
        assert (up.graphs, up.graphs_again) == (2 * GRAPHS, again * 2 * GRAPHS), "and each is counted"
        assert {"take_cells", "cuda_restore", "attach", "wake"} <= {step.name for step in up.steps}
    assert {one.pid for one in in_session(plane.part(instance.instance, "engine").pid)} == there, "the same processes"
    assert not await plane.events("InstanceFailed", after=before)
    assert not grants_overlap(await plane.events())


@pytest.mark.parametrize("fault", [CLINGS, STRANDS])
async def test_a_gang_that_does_not_come_back_whole_is_started_anew_and_nobody_is_left(
    plane: PlaneUnderTest, machine: Path, fault: str
) -> None:
    first = await say(plane, "pair")
    instance, engine, ranks = await _pair(plane)
    if fault == CLINGS:
        (machine / CLINGS).touch()
    assert plane.cli("checkpoint", "pair").returncode == 0
    (machine / CLINGS).unlink(missing_ok=True)
    if fault == STRANDS:
        (machine / STRANDS).touch()
    assert await say(plane, "pair") == first
    (machine / STRANDS).unlink(missing_ok=True)
    for one in (engine, *ranks):
        assert await one.ended(30)
    up = (await plane.events("InstanceUp"))[-1].event
    assert isinstance(up, InstanceUp) and (up.instance, up.graphs_again) == (instance.instance, 0)
    assert "start_engine" in {step.name for step in up.steps}, "in the same climb"
    assert plane.cli("sleep", "pair").returncode == 0
    assert [Room(machine).used(gpu) for gpu in GPUS] == [CONTEXT + 6 * MIB] * 2


async def test_a_gang_whose_ranks_share_more_than_they_give_up_sleeps_on_and_says_so(
    plane: PlaneUnderTest, machine: Path
) -> None:
    first, before = await say(plane, "pair"), await plane.head()
    instance = await plane.serving("pair")
    (machine / SHARES).touch()
    told = plane.cli("checkpoint", "pair")
    (machine / SHARES).unlink()
    assert told.returncode != 0 and "rank 1 can't be taken off its GPU: it shares a file" in told.stderr
    again = plane.cli("checkpoint", "pair")
    assert again.returncode != 0 and "has tried and could not" in again.stderr, "it is not asked again for nothing"
    assert await say(plane, "pair") == first
    assert (await plane.serving("pair")).instance == instance.instance
    assert not await plane.events("InstanceFailed", after=before)


async def test_a_rank_that_is_killed_off_its_gpu_is_the_gangs_end_and_the_next_request_starts_another(
    plane: PlaneUnderTest, machine: Path
) -> None:
    first, before = await say(plane, "pair"), await plane.head()
    instance, engine, ranks = await _pair(plane)
    assert plane.cli("checkpoint", "pair").returncode == 0
    plane.kill(ranks[0])
    await plane.until_fleet(lambda fleet: instance.instance not in fleet.instances, "the gang has failed")
    for one in (engine, *ranks):
        assert await one.ended(30)
    (failed,) = [one.event for one in await plane.events("InstanceFailed", after=before)]
    assert isinstance(failed, InstanceFailed) and failed.instance == instance.instance
    assert await say(plane, "pair") == first
    assert not grants_overlap(await plane.events())


async def test_a_rank_that_is_killed_takes_all_and_leaves_both_gpus_as_they_were(  # N7
    plane: PlaneUnderTest, machine: Path
) -> None:
    assert plane.cli("stop", "solo").returncode == 0
    first, before = await say(plane, "pair"), await plane.head()
    instance, engine, ranks = await _pair(plane)
    plane.kill(ranks[-1])
    await plane.until_fleet(lambda fleet: instance.instance not in fleet.instances, "the gang has failed")
    for one in (engine, *ranks):
        assert await one.ended(30)
    assert not (await plane.fleet()).grants
    (failed,) = [one.event for one in await plane.events("InstanceFailed", after=before)]
    assert isinstance(failed, InstanceFailed) and failed.instance == instance.instance
    room = Room(machine)
    await plane.until(lambda: _left(room), "the pool has dropped what it mapped for them")
    assert await say(plane, "pair") == first
    steps = [step.name for step in (await plane.events("InstanceUp"))[-1].event.steps]  # type: ignore[union-attr]
    assert "start_engine" in steps and "deposit" not in steps, "what the pool has of both is not read again"


async def test_a_rank_that_never_answers_ends_the_gang_at_its_deadline_and_who_waits_behind_it_is_served(  # C26
    plane: PlaneUnderTest, machine: Path
) -> None:
    first, before = await say(plane, "pair"), await plane.head()
    instance, engine, ranks = await _pair(plane)
    assert plane.cli("sleep", "pair").returncode == 0
    os.kill(ranks[-1].pid, signal.SIGSTOP)
    asked = asyncio.create_task(say(plane, "pair"))
    await plane.until_fleet(lambda fleet: fleet.instances[instance.instance].activity is Activity.CLIMBING, "it is woken")
    assert await say(plane, "solo"), "it has waited for the GPUs that the gang held"
    for one in (engine, *ranks):
        assert await one.ended(30)
    room = Room(machine)
    assert not {one.pid for one in ranks} & {pid for gpu in GPUS for pid in room.processes(gpu)}, "nothing of theirs is left"
    assert await asked == first, "by another gang"
    (failed,) = [one.event for one in await plane.events("InstanceFailed", after=before)]
    assert isinstance(failed, InstanceFailed)
    assert (failed.instance, failed.step, failed.code) == (instance.instance, "attach", "step_deadline")
    assert not grants_overlap(await plane.events())


async def _left(room: Room) -> bool:
    return all(room.used(gpu) == CONTEXT for gpu in GPUS)


async def test_a_live_model_is_taken_off_one_gpu_and_put_onto_the_other(plane: PlaneUnderTest, machine: Path) -> None:
    assert plane.cli("stop", "pair").returncode == 0
    first = await say(plane, "solo")
    before = await plane.serving("solo")
    engine = plane.part(before.instance, "engine")
    room = Room(machine)
    for _ in range(2):
        here = await plane.serving("solo")
        target = next(gpu for gpu in GPUS if gpu != here.device)
        beside = [asyncio.create_task(say(plane, "solo", 150)) for _ in range(3)]
        moved = await asyncio.to_thread(plane.cli, "move", "solo", "--to", target)
        assert moved.returncode == 0, moved.stderr
        assert len(set(await asyncio.gather(*beside))) == 1, "none lost, none cut"
        there = await plane.serving("solo")
        assert (there.instance, there.device) == (before.instance, target)
        assert engine.pid in room.processes(target) and engine.pid not in room.processes(here.device or "")
        assert await say(plane, "solo") == first
    steps = [step.name for step in (await plane.events("InstanceUp"))[-1].event.steps]  # type: ignore[union-attr]
    assert {"checkpoint", "take_cells", "cuda_restore", "attach", "wake"} <= set(steps)
    assert not grants_overlap(await plane.events())
