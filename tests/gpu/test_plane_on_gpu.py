"""A whole plane on a real GPU, hurt: tiny vLLM models, answers compared with what they were before.

`STANDIN=1` plays the GPU (to try these tests themselves): then only this file's own code is new on a machine that has one.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from controlplane.events import InstanceUp
from controlplane.rungs import Rung
from tests.gpu.onlookers import on
from tests.plane import PlaneUnderTest, running
from worker import gpus

STANDIN = bool(os.environ.get("STANDIN"))
UUID = "GPU-00000000-0000-0000-0000-000000000001"
MIB = 1 << 20
COLD_S = 180.0
PROMPT = "Once upon a time"
"""Sixteen bytes are sixteen ids: no whole block of a prefix cache."""
CYCLES = 10
pytestmark = pytest.mark.skipif(not STANDIN and find_spec("vllm") is None, reason="vLLM is not installed")
_HOG = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def settings(sources: dict[str, Path], kv: str) -> str:
    drafts = f', draft_model = "{sources["b"]}", num_speculative_tokens = 2'
    models = [
        f'[[model]]\nname = "{name}"\nsource = "{source}"\nengine = "vllm"\nshare = "1/2"\n'
        'idle = { sleep = "never", cold = "never" }\n'
        f'arguments = {{ max_model_len = 256, kv_bytes = "{kv}", max_num_seqs = 8, prefix_caching = true{more} }}\n'
        for name, source, more in (*((name, source, "") for name, source in sources.items()), ("drafted", sources["a"], drafts))
    ]
    return '[node]\npool_bytes = "1GiB"\n\n' + "\n".join(models)


@pytest.fixture(scope="module")
def plane(work: Path) -> Iterator[PlaneUnderTest]:
    if STANDIN:
        from tests.standin.install import install
        from tests.tinymodels import tiny

        sources = {name: tiny(work / name, "llama", seed) for name, seed in (("a", 1), ("b", 2))}
        environment = install(work / "machine", {UUID: 128 * MIB})
    else:
        from tests.bench.planemodels import made_together

        sources, environment = made_together(work, {"a": ("tiny", 1), "b": ("tiny", 2)}), {}
    with running(settings(sources, "16MiB" if STANDIN else "1GiB"), environment=environment) as started:
        yield started


@contextlib.contextmanager
def stranger(work: Path, leaves: int) -> Iterator[int]:
    """A process that is not the plane's and has all memory but so many bytes; its pid."""
    if STANDIN:
        from tests.standin.room import Room, Taker

        room = Room(work / "machine")
        taker = Taker(room, UUID)
        taker.take(room.free(UUID) - leaves)
        yield os.getpid()
        taker.give(taker.size)
        return
    with subprocess.Popen([sys.executable, "-c", _HOG, str(leaves)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hog:
        assert hog.stdout is not None
        assert hog.stdout.readline() == b"held\n"
        yield hog.pid
        hog.kill()


async def answered(plane: PlaneUnderTest, model: str, tokens: int = 16, prompt: str = PROMPT) -> tuple[int, str]:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    async with plane.rest() as client:
        answer = await client.post("/v1/completions", json=body, timeout=COLD_S)
    return answer.status_code, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text


async def asleep(plane: PlaneUnderTest) -> None:
    for name in ("a", "b"):
        plane.cli("sleep", name)
    await plane.until_fleet(lambda fleet: all(i.rung is Rung.SLEEP for i in fleet.instances.values()), "all asleep")


async def test_siblings_answer_after_any_way_up_as_they_did_at_first(plane: PlaneUnderTest) -> None:
    first = {name: await answered(plane, name) for name in ("a", "b")}
    assert {status for status, _ in first.values()} == {200}, first
    assert first["a"] != first["b"]
    for name in ("b", "a", "a", "b"):
        assert await answered(plane, name) == first[name]
    await asleep(plane)
    for name in ("b", "a"):
        assert await answered(plane, name) == first[name], "woken"


async def test_a_sleep_lets_streams_end_first(plane: PlaneUnderTest) -> None:
    """C08."""
    first = await answered(plane, "a", 150)
    asked = [asyncio.create_task(answered(plane, "a", 150)) for _ in range(8)]
    await plane.until_fleet(lambda fleet: sum(i.running for i in fleet.instances.values()) == 8, "eight run")
    done = await asyncio.to_thread(plane.cli, "sleep", "a")
    assert done.returncode == 0, done.stderr
    answers = await asyncio.gather(*asked)
    assert {status for status, _ in answers} == {200}
    assert {len(text) > 0 for _, text in answers} == {True}, "none was cut (in a batch bf16 breaks ties another way)"
    await asleep(plane)
    assert await answered(plane, "a", 150) == first


async def test_a_prefix_that_was_cached_before_a_sleep_is_not_used_after_it(plane: PlaneUnderTest) -> None:
    """C22: whatever the cache's index still held would lead into memory that is another's now."""
    shared = "All of them begin with the same words, so many that they fill several blocks of the cache, and then: "
    prompts = [f"{shared}{number}" for number in range(4)]
    first = [await answered(plane, "a", prompt=prompt) for prompt in prompts]
    assert {status for status, _ in first} == {200}
    await asleep(plane)
    first = [await answered(plane, "a", prompt=prompt) for prompt in prompts]  # each cycle's first one fills the cache
    for _ in range(CYCLES):
        plane.cli("sleep", "a")
        assert [await answered(plane, "a", prompt=prompt) for prompt in prompts] == first


async def test_a_stranger_with_all_the_memory_is_named_and_the_skeleton_sleeps_on(plane: PlaneUnderTest, work: Path) -> None:
    """C16, whether the memory is taken before the wake is decided or while it is under way."""
    first = await answered(plane, "a")
    await asleep(plane)
    pids = {i.pid for i in (await plane.fleet()).instances.values()}
    with stranger(work, leaves=MIB if STANDIN else 48 * MIB) as pid:
        asked = asyncio.create_task(answered(plane, "a"))
        (waiter,) = await plane.until_fleet(
            lambda fleet: [r for r in fleet.requests.values() if r.code == "foreign_memory"],
            "it waits for the stranger's memory",
        )
        assert f"pid {pid} " in waiter.reason
        fleet = await plane.fleet()
        assert {i.pid for i in fleet.instances.values()} == pids
        assert not fleet.grants
    assert await asked == first, "once the stranger has gone, with nobody's help"
    await plane.until_fleet(lambda fleet: not any(d.foreign for d in fleet.devices.values()), "it is forgotten")


async def test_a_dead_engine_is_replaced_and_answers_the_same(plane: PlaneUnderTest) -> None:
    first = await answered(plane, "a")
    instance = await plane.serving("a")
    plane.kill(plane.part(instance.instance, "engine"))
    await plane.until_fleet(lambda fleet: instance.instance not in fleet.instances, "its death is known")
    assert await answered(plane, "a") == first
    steps = [step.name for one in await plane.events("InstanceUp") for step in one.event.steps][-12:]  # type: ignore[union-attr]
    assert "deposit" not in steps, "what the pool has is not read again"


async def test_a_dead_pool_takes_nothing_from_who_is_up_and_the_next_one_serves(plane: PlaneUnderTest) -> None:
    first = await answered(plane, "a")
    pool = plane.child("pool")
    plane.kill(pool)
    assert await answered(plane, "a") == first, "what is mapped stays mapped"
    await asleep(plane)
    assert await answered(plane, "a") == first, "the next daemon has adopted the set"
    assert plane.child("pool") != pool


async def test_a_dead_worker_is_followed_by_one_that_takes_all_up(plane: PlaneUnderTest) -> None:
    first = await answered(plane, "a")
    engine = plane.part((await plane.serving("a")).instance, "engine")
    plane.kill(plane.child("worker"))
    assert await answered(plane, "a") == first
    await asleep(plane)
    assert await answered(plane, "a") == first
    assert plane.part((await plane.serving("a")).instance, "engine") == engine


async def test_a_model_that_another_drafts_for_is_woken_with_it_and_by_its_side(plane: PlaneUnderTest) -> None:
    first = {name: await answered(plane, name) for name in ("a", "drafted")}
    assert {status for status, _ in first.values()} == {200}, first
    instance = await plane.serving("drafted")
    for _ in range(3):
        assert plane.cli("sleep", "drafted").returncode == 0
        assert await answered(plane, "drafted") == first["drafted"]
    ups: list[InstanceUp] = [e.event for e in await plane.events("InstanceUp") if e.event.model == "drafted"]  # type: ignore[misc, union-attr]
    assert {up.instance for up in ups} == {instance.instance}, "woken, not started again"
    assert await answered(plane, "a") == first["a"]
    plane.cli("stop", "drafted")
    await plane.until_fleet(lambda fleet: instance.instance not in fleet.instances, "it is gone")


async def test_at_the_end_the_device_is_as_it_was(plane: PlaneUnderTest, work: Path) -> None:
    for name in ("a", "b"):
        plane.cli("stop", name)
    await plane.until_fleet(lambda fleet: not fleet.instances, "all gone")
    if STANDIN:
        from tests.standin.room import Room

        assert Room(work / "machine").used(UUID) == 2 * MIB
        return
    device = next(iter((await plane.fleet()).devices))
    pool = plane.child("pool").pid
    for _ in range(50):
        if set(gpus.processes(device)) <= {pool}:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"nobody but the pool ({pool}) is expected: {on(device)}")
