"""Every way up to a first answer of real weights: from disk, from sleep, cold; beside each other, in one run.

`python -m tests.bench.bench_ladder --gguf FILE [--cycles 3]`: a whole plane, SmolLM2 (or any GGUF file or model directory), one
device. Each cycle takes the model to disk and asks it; takes it to sleep and asks it; ends its processes, removes its image and
asks it, which is the warmest cold start. All answers are compared. The step tables are the workers' own reports.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import httpx

from tests.bench.figures import Table
from tests.plane import PlaneUnderTest, running

PROMPT = "What is a kettle?"
MODEL = "measured"
SETTINGS = """
[node]
pool_bytes = "1GiB"
devices = [{{ name = "cpu0", bytes = "4GiB" }}]

[[model]]
name = "measured"
source = "{source}"
share = 1
idle = {{ sleep = "never", cold = "never" }}
arguments = {{ max_model_len = 512, max_num_seqs = 2 }}
"""
GOAL_MS = 2000


class Asker:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.answers: set[str] = set()

    async def ask(self) -> tuple[float, float]:
        """Seconds to the first piece of text and to the whole answer; the answer is kept for comparison."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": PROMPT}],
            "stream": True,
            "max_tokens": 8,
            "temperature": 0,
        }
        began, first, pieces = time.perf_counter(), 0.0, list[str]()
        async with self._client.stream("POST", "/v1/chat/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                assert '"error"' not in line, line
                if '"content":"' in line and '"content":""' not in line:
                    first = first or time.perf_counter() - began
                    pieces.append(line.partition('"content":"')[2].partition('"')[0])
        self.answers.add("".join(pieces))
        return first, time.perf_counter() - began

    async def operate(self, what: str) -> float:
        """Carry out an operation; return its seconds."""
        began = time.perf_counter()
        answer = await self._client.post(f"/api/models/{MODEL}/{what}", json={})
        assert answer.status_code == 202, answer.text
        begun = answer.json()
        over = await self._client.get(f"/api/operations/{begun['operation']}", params={"after": begun["position"], "wait": 60})
        assert over.json()["state"] == "succeeded", over.text
        return time.perf_counter() - began

    async def remove_images(self, plane: PlaneUnderTest) -> None:
        for image in (await self._client.get("/api/images")).json():
            assert (await self._client.delete(f"/api/images/{image['image']}")).status_code == 200
        await plane.until_fleet(lambda fleet: not fleet.images, "no images")


async def measure(source: Path, cycles: int) -> Table:
    found: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        found.setdefault(what, []).append(seconds)

    with running(SETTINGS.format(source=source)) as plane:
        async with plane.rest() as client:
            await plane.inspected(MODEL) if source.is_dir() else await plane.until_fleet(
                lambda fleet: fleet.models[MODEL].facts, "inspected", 180
            )
            asker = Asker(client)
            note("first cold start -> first token", (await asker.ask())[0])
            for _ in range(3):
                note("up -> first token", (await asker.ask())[0])
            note("up -> saved, image built and proved", await asker.operate("save"))
            await asker.ask()
            for _ in range(cycles):
                note("up -> saved", await asker.operate("save"))
                note("saved -> first token", (await asker.ask())[0])
                note("up -> sleep", await asker.operate("sleep"))
                note("sleep -> first token", (await asker.ask())[0])
            for _ in range(cycles):
                await asker.operate("stop")
                await asker.remove_images(plane)
                note("warm cold start -> first token", (await asker.ask())[0])
            assert len(asker.answers) == 1, asker.answers
        ladder = await steps(plane)
    table = Table(f"the ladder of {source.name}, one device of the CPU, all answers equal")
    middle = {what: table.timed(what, seconds) for what, seconds in found.items()}
    for name, ms in ladder.items():
        table.figure(f"  step {name}", f"p50 {statistics.median(ms):8.1f} ms   n {len(ms)}")
    cold = middle["warm cold start -> first token"]
    beside = f"warmest cold start of the same run: {cold:.0f} ms ({cold / middle['saved -> first token']:.1f} times as long)"
    table.row("saved -> first answer", f"<= {GOAL_MS} ms", f"{middle['saved -> first token']:.0f} ms", beside)
    return table


async def steps(plane: PlaneUnderTest) -> dict[str, list[float]]:
    """Milliseconds of each step, by where the climb began or the way down ended."""
    found: dict[str, list[float]] = {}
    for one in await plane.events("InstanceUp", "InstanceSaved"):
        event: Any = one.event
        names = {step.name for step in event.steps}
        way = (
            "saved"
            if one.type == "InstanceSaved"
            else "restored"
            if "restore" in names
            else "cold"
            if "connect" in names
            else "woken"
        )
        for step in event.steps:
            found.setdefault(f"{way}: {step.name}", []).append(step.took_ms)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_ladder")
    parser.add_argument("--gguf", type=Path, required=True, help="a GGUF file, or a model directory")
    parser.add_argument("--cycles", type=int, default=3)
    options = parser.parse_args()
    table = asyncio.run(measure(options.gguf.resolve(), options.cycles))
    table.show()
    for row in table.rows:
        print(row)


if __name__ == "__main__":
    main()
