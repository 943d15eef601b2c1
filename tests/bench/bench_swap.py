"""What a swap of real weights adds to a first token: SmolLM2 after a sleep, and its specialisation on the same skeleton.

`python -m tests.bench.bench_swap [--cycles 5] [--models DIR]`. A whole plane with the demonstration's models on one device that
holds one of them. DIR is a finished demonstration's `models/demo`; without it the models are made, which takes minutes.

The prompt is short, eight tokens are asked for. "Added to the first token": of an engine that has just been woken, against the
same prompt asked again at once; what a request waits while the model is asleep is printed beside it, with its steps.
"""

import argparse
import asyncio
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from compose import demo
from tests.bench.figures import Table
from tests.plane import PlaneUnderTest

PROMPT = "What is a kettle?"
FIRST, SECOND = "smollm2", "smollm2-harbour"
IDLE = 'idle = { sleep = "never", cold = "never" }\n'


class Asker:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def first_token(self, model: str) -> float:
        """Seconds to the first piece of text; the stream is read to its end."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": PROMPT}],
            "stream": True,
            "max_tokens": 8,
            "temperature": 0,
        }
        began, first = time.perf_counter(), 0.0
        async with self._client.stream("POST", "/v1/chat/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                assert '"error"' not in line, line
                if not first and '"content":"' in line and '"content":""' not in line:
                    first = time.perf_counter() - began
        return first

    async def warm(self, model: str, times: int = 3) -> float:
        return statistics.median([await self.first_token(model) for _ in range(times)])

    async def operate(self, model: str, what: str) -> float:
        """Carry out an operation; return its seconds."""
        began = time.perf_counter()
        answer = await self._client.post(f"/api/models/{model}/{what}", json={})
        assert answer.status_code == 202, answer.text
        begun = answer.json()
        over = await self._client.get(f"/api/operations/{begun['operation']}", params={"after": begun["position"], "wait": 60})
        assert over.json()["state"] == "succeeded", over.text
        return time.perf_counter() - began


async def cycles(asker: Asker, number: int) -> dict[str, list[float]]:
    """Seconds by what was measured, one of each a cycle."""
    found: dict[str, list[float]] = {}

    def note(what: str, seconds: float) -> None:
        found.setdefault(what, []).append(seconds)

    for model in (SECOND, FIRST):
        await asker.first_token(model)  # processes started, weights read, the first token's own memory taken
    for _ in range(number):
        warm = await asker.warm(FIRST)
        note("warm", warm)
        note("sleep", await asker.operate(FIRST, "sleep"))
        note("wake", await asker.operate(FIRST, "load"))
        note("first after wake", await asker.first_token(FIRST) - warm)
        await asker.operate(FIRST, "sleep")
        note("asked asleep", await asker.first_token(FIRST) - warm)
        note("asked for the other", await asker.first_token(SECOND) - warm)
        warm = await asker.warm(SECOND)
        note("switch", await asker.operate(FIRST, "load"))
        note("first after switch", await asker.first_token(FIRST) - warm)
    return found


async def steps(plane: PlaneUnderTest) -> dict[str, list[float]]:
    """Milliseconds of each step of the ladder, of all climbs but each engine's first."""
    found: dict[str, list[float]] = {}
    for one in await plane.events("InstanceUp", "InstanceSlept"):
        event: Any = one.event
        for step in event.steps:
            found.setdefault(f"{one.type.removeprefix('Instance').lower()}: {step.name}", []).append(step.took_ms)
    return found


def report(found: dict[str, list[float]], ladder: dict[str, list[float]]) -> Table:
    table = Table("SmolLM2 and its specialisation, one skeleton, one device")
    middle = {what: table.timed(what, seconds) for what, seconds in found.items()}
    for name, ms in ladder.items():
        table.figure(f"  step {name}", f"p50 {statistics.median(ms):8.1f} ms   low {min(ms):8.1f} ms   n {len(ms)}")
    beside = (
        f"first token warm {middle['warm']:.0f} ms; the wake itself {middle['wake']:.0f} ms, sleeping {middle['sleep']:.0f} ms"
    )
    goal, added = "<= 50 ms over warm", "{:+.0f} ms"
    table.row("SmolLM2: first token after a wake", goal, added.format(middle["first after wake"]), beside)
    table.row(
        "SmolLM2: first token asked while asleep, wake included", "(stated)", added.format(middle["asked asleep"]), beside
    )
    beside = f"first token warm {middle['warm']:.0f} ms; the switch itself {middle['switch']:.0f} ms"
    table.row("first token after a switch on the same skeleton", goal, added.format(middle["first after switch"]), beside)
    whole = added.format(middle["asked for the other"])
    table.row("first token asked while the other is up, switch included", "(stated)", whole, beside)
    return table


async def measure(*argv: str) -> list[Table]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--models", type=Path, help="a finished demonstration's models/demo")
    options = parser.parse_args(argv)
    plane = PlaneUnderTest("")
    try:
        plane.settings_file.write_text(await _settings(plane.data, options.models))
        plane.start()
        async with plane.rest() as client:
            found = await cycles(Asker(client), options.cycles)
            table = report(found, await steps(plane))
    finally:
        plane.finish()
    table.show()
    return [table]


async def _settings(data: Path, made: Path | None) -> str:
    """The demonstration's two SmolLM2 on one device, their sources in `data`."""
    (data / "models").mkdir(mode=0o700)
    if made is not None:
        await asyncio.to_thread(shutil.copytree, made, data / "models" / "demo")
    specs = await demo.make(data, print)
    return demo.settings(specs[:2]).replace("[[model]]\n", f"[[model]]\n{IDLE}").replace(f", {_device(demo.DEVICES[1])}", "")


def _device(device: tuple[str, str]) -> str:
    return f'{{ name = "{device[0]}", bytes = "{device[1]}" }}'


if __name__ == "__main__":
    asyncio.run(measure(*sys.argv[1:]))
