"""The lower rungs on a whole plane on a real GPU: round trips of a tiny vLLM engine by turns; nothing grows, nothing is left.

`STANDIN=1` runs it without a GPU, with engines that pretend to hold one (to try these tests themselves): then only what the
driver says is left out. `ROUND_TRIPS` says how many of each kind.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Set
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.fleet import Instance
from controlplane.rungs import Rung
from pool.place import place
from tests.gpu.onlookers import on
from tests.plane import NODE, PlaneUnderTest, fake, running
from worker import gpus, processes

STANDIN = bool(os.environ.get("STANDIN"))
ROUND_TRIPS = int(os.environ.get("ROUND_TRIPS", "10"))
MIB = 1 << 20
COLD_S = 180.0
RUNGS = {"checkpoint": Rung.CHECKPOINT, "save": Rung.SAVED}
BEGINNING = "Of all that was said that evening the following is the part that everybody remembered, word for word. " * 4
PROMPTS = [f"{BEGINNING}{number * 37}: " for number in range(4)]
"""C22: one long beginning, which a prefix cache keeps; it must not outlive the memory that it is in."""
pytestmark = [
    pytest.mark.skipif(not STANDIN and find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(400),
]


def settings(work: Path, *, share: str, siblings: bool = True) -> str:
    """Two models; siblings have one skeleton and one image, others one each."""
    sizes = {"a": 1024, "b": 1024 if siblings else 1280}
    if STANDIN:
        return NODE + "".join(fake(name, share=share, gpu=True, context_tokens=size) for name, size in sizes.items())
    from tests.bench.planemodels import made_together

    models = [
        f'[[model]]\nname = "{name}"\nsource = "{source}"\nengine = "vllm"\nshare = "{share}"\n'
        'idle = { sleep = "never", cold = "never" }\n'
        f'arguments = {{ max_model_len = {sizes[name]}, kv_bytes = "1GiB", max_num_seqs = 8 }}\n'
        for name, source in made_together(work, {"a": ("tiny", 1), "b": ("tiny", 2)}).items()
    ]
    return '[node]\npool_bytes = "1GiB"\n\n' + "\n".join(models)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneUnderTest]:
    with running(settings(tmp_path_factory.mktemp("rungs"), share="1/2")) as started:
        yield started


async def able(plane: PlaneUnderTest) -> None:
    await plane.inspected("a", "b")
    fleet = await plane.fleet()
    (node,) = fleet.nodes.values()
    if node.no_images:
        pytest.skip(f"engines can't be saved here: {node.no_images}")


async def answers(plane: PlaneUnderTest, model: str) -> list[str]:
    """To all prompts, one after the other: the second finds the beginning of the first in the cache, if there is one."""
    found = []
    async with plane.rest() as client:
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
            answer = await client.post("/v1/completions", json=body, timeout=COLD_S)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["choices"][0]["text"])
    return found


async def down(plane: PlaneUnderTest, model: str, operation: str) -> Instance:
    instance = (await plane.serving(model)).instance
    done = plane.cli(operation, model)
    assert done.returncode == 0, done.stderr + done.stdout
    there: Instance = await plane.until_fleet(
        lambda fleet: (i := fleet.instances.get(instance)) and i.rung is RUNGS[operation] and i, f"{model}: {operation}"
    )
    return there


async def nobody_but_the_pool_is_on_a_device(plane: PlaneUnderTest, *, others: Set[int] = frozenset()) -> None:
    """others: who was there before."""
    if STANDIN:
        return
    pool = plane.child("pool").pid
    for device in (await plane.fleet()).devices:

        async def alone(device: str = device) -> bool:
            return set(gpus.processes(device)) <= {pool, *others}

        try:
            await plane.until(alone, f"nobody but the pool ({pool}) is on {device}", 20)
        except AssertionError as error:
            raise AssertionError(f"{error}: {on(device)}") from error


def of_engines(plane: PlaneUnderTest) -> list[int]:
    """Processes of instances: holders, engines, frontends."""
    mark, found = f"{plane.data}/run/inst/".encode(), []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def bytes_in(directory: Path) -> int:
    total = 0
    for file in directory.rglob("*"):
        try:
            total += file.stat().st_blocks * 512 if file.is_file() else 0
        except OSError:
            continue
    return total


class Seen(msgspec.Struct, frozen=True):
    """What a turn's engine takes, up and asked, and what its plane takes beside it."""

    files: int
    private: int
    device: int
    shm: int
    worker_files: int
    holder_files: int
    image_bytes: int

    def beyond(self, other: "Seen", slack: "Seen") -> list[str]:
        names = Seen.__struct_fields__
        grown = {name: (getattr(other, name), getattr(self, name)) for name in names}
        return [f"{name}: {was} -> {is_}" for name, (was, is_) in grown.items() if is_ > was + getattr(slack, name)]


SLACK = Seen(files=2, private=64 * MIB, device=16 * MIB, shm=MIB, worker_files=6, holder_files=2, image_bytes=32 * MIB)


async def look(plane: PlaneUnderTest, instance: Instance) -> Seen:
    engine, holder = (plane.part(instance.instance, role).pid for role in ("engine", "holder"))
    device = 0 if STANDIN else gpus.processes(instance.device or "").get(engine, 0)
    return Seen(
        files=open_files(engine), private=processes.private_bytes(engine), device=device,
        shm=bytes_in(Path(f"/proc/{engine}/root/dev/shm")), worker_files=open_files(plane.child("worker").pid),
        holder_files=open_files(holder),
        image_bytes=sum(file.stat().st_size for file in (plane.data / "images").rglob("*") if file.is_file()),
    )  # fmt: skip


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def host_ledger(plane: PlaneUnderTest) -> dict[str, Any]:
    async with plane.rest() as client:
        (node,) = (await client.get("/api/nodes")).json()
    found: dict[str, Any] = node["host"]
    return found


async def test_round_trips_by_turns_leave_the_answers_as_they_were_and_nothing_grows(plane: PlaneUnderTest) -> None:
    """C22, C50."""
    await able(plane)
    first = await answers(plane, "a")
    seen: list[Seen] = []
    rested: list[int] = []
    for turn in range(2 * ROUND_TRIPS):
        operation = ("checkpoint", "save")[turn % 2]
        before = plane.part((await plane.serving("a")).instance, "engine").pid
        rests = await down(plane, "a", operation)
        await nobody_but_the_pool_is_on_a_device(plane)
        ledger = await host_ledger(plane)
        if operation == "checkpoint":
            assert rests.host_bytes > MIB and ledger["checkpointed_bytes"] > MIB
            assert ledger["checkpoint_bytes"] >= ledger["checkpointed_bytes"]
        else:
            assert of_engines(plane) == [] and ledger["checkpointed_bytes"] == 0
            assert list((plane.data / "run" / "inst").iterdir()) == []
            rested.append(bytes_in(place(plane.data / "run" / "pool", 0)))
        assert await answers(plane, "a") == first, (turn, operation)
        serves = await plane.serving("a")
        assert (plane.part(serves.instance, "engine").pid == before) is (operation == "checkpoint")
        seen.append(await look(plane, serves))
        print(turn, operation, json.dumps(msgspec.structs.asdict(seen[-1])), flush=True)
    early, late = seen[:ROUND_TRIPS], seen[ROUND_TRIPS:]
    most = Seen(*(max(getattr(one, name) for one in early) for name in Seen.__struct_fields__))
    grown = [change for one in late for change in one.beyond(most, SLACK)]
    assert not grown, grown
    assert max(rested) <= rested[0] + MIB, "of a saved engine memory has its pool share alone"
    assert len(await plane.events("ImageBuilt")) == 1
    assert not await plane.events("InstanceFailed", "ImageFailed")


async def test_siblings_come_up_from_one_image_at_once_each_with_its_own_answers(plane: PlaneUnderTest) -> None:
    """N18."""
    await able(plane)
    first = {name: await answers(plane, name) for name in ("a", "b")}
    assert STANDIN or first["a"] != first["b"]
    for name in ("b", "a"):  # one skeleton of both, or one each: what a climb was seen to take decides
        if any(i.model == name and i.rung is Rung.UP for i in (await plane.fleet()).instances.values()):
            await down(plane, name, "save")
    assert of_engines(plane) == []
    head = await plane.head()
    both = await asyncio.gather(answers(plane, "a"), answers(plane, "b"))
    assert dict(zip("ab", both, strict=True)) == first
    ups: list[Any] = [event.event for event in await plane.events("InstanceUp", after=head)]
    assert len({up.instance for up in ups}) == 2 and len({up.image for up in ups}) == 1
    assert ups[0].image is not None
    for name in ("a", "b"):
        plane.cli("stop", name)
    await plane.until_fleet(lambda fleet: not fleet.instances, "all gone")


async def test_a_skeleton_that_waits_for_room_on_its_host_goes_no_further_than_sleep(plane: PlaneUnderTest) -> None:
    """Both numbers are said; then the settings allow more, at once."""
    await answers(plane, "a")
    instance = await plane.serving("a")
    text = plane.settings_file.read_text()
    limited = text.replace("[node]\n", "[node]\ncheckpoint_bytes = 4096\n", 1)
    plane.settings_file.write_text(limited)
    await plane.until_fleet(lambda fleet: fleet.nodes["n1"].checkpoint_bytes == 4096, "the limit is there")
    refused = plane.cli("checkpoint", "a")
    assert refused.returncode == 1 and "4.0 KiB is left" in refused.stderr and "checkpoint_bytes" in refused.stderr
    plane.settings_file.write_text(text)
    await plane.until_fleet(lambda fleet: fleet.nodes["n1"].checkpoint_bytes != 4096, "it is gone")
    rests = await down(plane, "a", "checkpoint")
    assert rests.instance == instance.instance


@pytest.mark.skipif(not STANDIN and len(gpus.gpus()) < 2, reason="one GPU is not enough")
async def test_an_image_is_restored_onto_another_device(tmp_path: Path) -> None:
    others = {pid for gpu in gpus.gpus() for pid in gpus.processes(gpu.uuid)}
    with running(settings(tmp_path, share="1", siblings=False)) as plane:
        await able(plane)
        first = await answers(plane, "a")
        home = (await plane.serving("a")).device
        await down(plane, "a", "save")
        await nobody_but_the_pool_is_on_a_device(plane, others=others)
        await answers(plane, "b")
        assert (await plane.serving("b")).device == home, "it has taken the place"
        head = await plane.head()
        assert await answers(plane, "a") == first
        serves = await plane.serving("a")
        assert serves.device not in (None, home)
        up: Any = (await plane.events("InstanceUp", after=head))[-1].event
        assert up.model == "a" and up.image is not None, "from the image, on the other device"
        print({step.name: step.took_ms for step in up.steps}, "took", up.took_ms, flush=True)
        if not STANDIN:
            engine = plane.part(serves.instance, "engine").pid
            assert engine in gpus.processes(serves.device or "") and engine not in gpus.processes(home or "")
        for name in ("a", "b"):
            plane.cli("stop", name)
        await plane.until_fleet(lambda fleet: not fleet.instances, "all gone")
        await nobody_but_the_pool_is_on_a_device(plane, others=others)
