"""A plane on two GPUs, real or played: asked, and looked at, for the parts of a bench."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import httpx

from controlplane.envelope import Recorded
from controlplane.fleet import Fleet, Instance
from controlplane.rungs import Rung
from tests.bench.planefigures import events_of, fleet_of
from tests.bench.planemodels import prompts_of
from tests.planeprocesses import PlaneProcesses
from worker import gpus

COLD_S: Final = 170.0

Row = dict[str, Any]


class PairRoom:
    """`machine`: where the GPUs are played; None: they are real. `first`: what each model answered first."""

    def __init__(self, plane: PlaneProcesses, machine: Path | None) -> None:
        self.plane, self.machine = plane, machine
        self.first: dict[str, str] = {}

    # ---- asking ---------------------------------------------------------------------------------------------

    async def ask(self, model: str, number: int = 0, tokens: int = 24) -> tuple[str, float]:
        begun = time.monotonic()
        answer = await self.post(model, prompts_of(model)[number], tokens)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{model}: {answer.status_code} {answer.text[:600]}")
        return str(answer.json()["choices"][0]["text"]), round(time.monotonic() - begun, 3)

    async def post(self, model: str, prompt: str, tokens: int) -> httpx.Response:
        async with self.client() as client:
            return await client.post("/v1/completions", json=_body(model, prompt, tokens))

    @contextlib.asynccontextmanager
    async def streamed(self, model: str, prompt: str, tokens: int) -> AsyncIterator[AsyncIterator[str]]:
        """Lines with something in them."""
        body = _body(model, prompt, tokens) | {"stream": True}
        async with self.client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            yield (line async for line in answer.aiter_lines() if line.startswith("data: {"))

    def client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.plane.token}"}
        return httpx.AsyncClient(base_url=self.plane.url, headers=headers, timeout=COLD_S, trust_env=False)

    async def cli(self, *arguments: str) -> tuple[int, str, str]:
        done: subprocess.CompletedProcess[str] = await asyncio.to_thread(self.plane.cli, *arguments)
        return done.returncode, done.stdout[-300:], done.stderr[-400:]

    async def fleet(self) -> Fleet:
        return await fleet_of(self.plane)

    async def until(self, true: Any, deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        while not true(await self.fleet()):
            if time.monotonic() > ends:
                raise TimeoutError
            await asyncio.sleep(0.05)

    def up(self, fleet: Fleet, model: str) -> Instance:
        return next(one for one in fleet.instances.values() if one.model == model and one.rung is Rung.UP)

    async def since(self, head: int) -> list[Recorded]:
        return [event for event in await events_of(self.plane) if event.position > head]

    async def ups(self, head: int) -> list[Row]:
        events = await events_of(self.plane)
        directed = {event.position: event.at_ms for event in events if event.type == "InstanceDirected"}
        found = []
        for one in events:
            up: Any = one.event
            if one.type == "InstanceUp" and one.position > head:
                steps: dict[str, float] = {}
                for step in up.steps:
                    steps[step.name] = round(steps.get(step.name, 0) + step.took_ms, 1)
                whole_ms = one.at_ms - directed.get(up.directive, one.at_ms)
                found.append(
                    {
                        "model": up.model, "whole_ms": whole_ms, "took_ms": up.took_ms, "bytes": up.bytes_mapped,
                        "graphs": up.graphs, "graphs_again": up.graphs_again, "check": up.check, "steps": steps,
                    }
                )  # fmt: skip
        return found

    # ---- what the driver says -------------------------------------------------------------------------------

    def users(self, device: str) -> dict[int, int]:
        if self.machine is None:
            return gpus.processes(device)
        from tests.standin.room import Room

        return Room(self.machine).processes(device)

    @contextlib.contextmanager
    def held(self, after: int) -> Iterator[None]:
        """Played engines are quicker than a question: they say no more than so many ids meanwhile."""
        if self.machine is None:
            yield
            return
        from tests.standin.engine import HOLDS

        (self.machine / HOLDS).write_text(str(after))
        try:
            yield
        finally:
            (self.machine / HOLDS).unlink()


def _body(model: str, prompt: str, tokens: int) -> Row:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
