"""The parts of a bench of a plane on two GPUs, one method each."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from controlplane.envelope import Recorded
from controlplane.fleet import Fleet, Instance
from controlplane.rungs import Rung
from tests.bench.planefigures import beat_of, events_of, fleet_of, move_figure
from tests.bench.planemodels import prompts_of
from tests.planeprocesses import PlaneProcesses
from worker import gpus
from worker.processes import in_session

COLD_S: Final = 170.0
BACK_S: Final = 5.0
"""Within this, everything of a gang is back whose rank was killed."""
LONG: Final = 900
"""Tokens: two seconds of a tiny model. Played ones have no room for so many, and are held instead."""
LONG_PLAYED: Final = 100

Row = dict[str, Any]


class Pair:
    """`machine`: where the GPUs are played; None: they are real."""

    def __init__(self, plane: PlaneProcesses, machine: Path | None) -> None:
        self._plane, self._machine = plane, machine
        self._first: dict[str, str] = {}
        """What each model answered first."""

    # ---- a gang ---------------------------------------------------------------------------------------------

    async def gang_up(self) -> Row:
        self._first["pair"], took_s = await self._ask("pair")
        instance = self._up(await self._fleet(), "pair")
        users = {device: sorted(self._users(device)) for device in instance.devices}
        return {
            "first_answer_s": took_s, "devices": instance.devices, "grants": instance.grants, "weights": instance.weight_set,
            "users": users, "up": await self._ups(0), "good": len(instance.devices) == 2,
        }  # fmt: skip

    async def gang_cycle(self) -> Row:
        head = (await self._fleet()).position
        slept = await self._cli("sleep", "pair")
        again, took_s = await self._ask("pair")
        ups = await self._ups(head)
        same = again == self._first["pair"]
        counted = [up["graphs_again"] for up in ups]
        return {"sleep": slept, "answer_s": took_s, "same": same, "up": ups, "good": same and counted == [0] and not slept[0]}

    async def owners(self) -> Row:
        """The plane's word of each device's memory beside the driver's."""
        beat = await beat_of(self._plane)
        return {
            "owners": {device: msgspec.to_builtins(owner) for device, owner in beat.owners.items()},
            "driver_bytes": {device: sum(self._users(device).values()) for device in beat.owners},
            "good": not any(owner.foreign for owner in beat.owners.values()),
        }

    async def rank_killed(self) -> Row:
        """N7, in the middle of an answer: it is told, and cells, processes and memory of both GPUs are back."""
        instance = self._up(await self._fleet(), "pair")
        record = json.loads((self._plane.data / "run" / "inst" / instance.instance / "instance.json").read_text())
        own = {process.pid for process in in_session(record["engine"]["pid"])}
        on = {device: [pid for pid in self._users(device) if pid in own] for device in instance.devices}
        with self._held(after=5):
            async with self._streamed("pair", prompts_of("pair")[1], LONG if self._machine is None else LONG_PLAYED) as lines:
                said = [await anext(lines)]
                head, wall, begun = (await self._fleet()).position, time.time(), time.monotonic()
                os.kill(on[instance.devices[-1]][0], signal.SIGKILL)
                said += [line async for line in lines]
        told_s = time.monotonic() - begun
        await self._until(lambda fleet: instance.instance not in fleet.instances, 30)
        failed = [e for e in await events_of(self._plane) if e.type == "InstanceFailed" and e.position > head]
        there = {pid for pids in on.values() for pid in pids}
        while (left := [pid for pid in there if _alive(pid)]) and time.monotonic() < begun + 30:
            await asyncio.sleep(0.05)
        back_s = time.monotonic() - begun
        grants = [g.number for g in (await self._fleet()).grants.values() if g.instance == instance.instance]
        memory = {device: {pid: size for pid, size in self._users(device).items() if pid in there} for device in on}
        failed_s = [round(one.at_ms / 1000 - wall, 2) for one in failed]
        clean = not left and not grants and not any(memory.values())
        return {
            "ranks": on, "lines": len(said), "said_last": said[-1][:300], "told_s": round(told_s, 2),
            "failed_s": failed_s, "back_s": round(back_s, 2), "goal_s": BACK_S,
            "left": left, "grants": grants, "memory": memory,
            "good": "engine_died" in said[-1] and len(failed) == 1 and back_s <= BACK_S and clean,
        }  # fmt: skip

    async def gang_again(self) -> Row:
        head = (await self._fleet()).position
        again, took_s = await self._ask("pair")
        same = again == self._first["pair"]
        return {"answer_s": took_s, "same": same, "up": await self._ups(head), "good": same}

    # ---- a live model that moves ----------------------------------------------------------------------------

    async def solo_up(self) -> Row:
        head = (await self._fleet()).position
        self._first["solo"], took_s = await self._ask("solo")
        return {"first_answer_s": took_s, "device": self._up(await self._fleet(), "solo").device, "up": await self._ups(head)}

    async def move(self) -> Row:
        """Asked before and while it moves. Its figure is from the directive to its being up, beside its own steps' goal."""
        fleet = await self._fleet()
        instance, head = self._up(fleet, "solo"), fleet.position
        target = next(one for one in fleet.devices.values() if one.device != instance.device and one.kind == "gpu")
        before = asyncio.create_task(self._ask("solo", 2, 64))
        await asyncio.sleep(0.02)
        moving = asyncio.create_task(self._cli("move", "solo", "--to", target.device))
        await self._until(lambda fleet: moving.done() or any(one.moving_to for one in fleet.instances.values()), 20)
        during = asyncio.create_task(self._ask("solo", 2, 64))
        moved, (one, waited), (other, waited_too) = await moving, await before, await during
        after = self._up(await self._fleet(), "solo")
        again, _ = await self._ask("solo")
        ups = [up for up in await self._ups(head) if up["model"] == "solo"]
        failed = [msgspec.to_builtins(e.event) for e in await self._since(head) if e.type == "InstanceFailed"]
        there, same = after.device == target.device, one == other and again == self._first["solo"]
        return {
            "figure": move_figure(ups[-1]) if ups else None, "there": there, "same": same, "waited_s": [waited, waited_too],
            "same_process": after.pid == instance.pid, "cli": moved, "failed_events": failed, "up": ups,
            "good": not moved[0] and there and same and not failed,
        }  # fmt: skip

    async def fetched(self) -> Row:
        """A sleeper whose GPU another model has taken whole comes to the free one; no skeleton is started for it."""
        instance = self._up(await self._fleet(), "solo")
        told = [await self._cli("sleep", "solo")]
        _, cold_s = await self._ask("whole")
        if self._up(await self._fleet(), "whole").device != instance.device:
            told.append(await self._cli("move", "whole", "--to", str(instance.device)))
        head = (await self._fleet()).position
        again, took_s = await self._ask("solo")
        fleet = await self._fleet()
        after, whole = self._up(fleet, "solo"), self._up(fleet, "whole")
        fetched = [
            e for e in await self._since(head) if e.type == "InstanceDirected" and getattr(e.event, "code", "") == "fetched"
        ]
        same, came = again == self._first["solo"], after.pid == instance.pid and after.device != instance.device == whole.device
        return {
            "cold_s": cold_s, "answer_s": took_s, "same": same, "came": came, "fetched": len(fetched), "told": told,
            "up": await self._ups(head), "good": same and came and len(fetched) == 1 and not any(code for code, *_ in told),
        }  # fmt: skip

    async def audit(self) -> Row:
        audit = await self._cli("audit")
        return {"audit": audit, "good": not audit[0]}

    # ---- asking ---------------------------------------------------------------------------------------------

    async def _ask(self, model: str, number: int = 0, tokens: int = 24) -> tuple[str, float]:
        begun = time.monotonic()
        answer = await self._post(model, prompts_of(model)[number], tokens)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"{model}: {answer.status_code} {answer.text[:600]}")
        return str(answer.json()["choices"][0]["text"]), round(time.monotonic() - begun, 3)

    async def _post(self, model: str, prompt: str, tokens: int) -> httpx.Response:
        async with self._client() as client:
            return await client.post("/v1/completions", json=_body(model, prompt, tokens))

    @contextlib.asynccontextmanager
    async def _streamed(self, model: str, prompt: str, tokens: int) -> AsyncIterator[AsyncIterator[str]]:
        """Lines with something in them."""
        body = _body(model, prompt, tokens) | {"stream": True}
        async with self._client() as client, client.stream("POST", "/v1/completions", json=body) as answer:
            yield (line async for line in answer.aiter_lines() if line.startswith("data: {"))

    def _client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self._plane.token}"}
        return httpx.AsyncClient(base_url=self._plane.url, headers=headers, timeout=COLD_S, trust_env=False)

    async def _cli(self, *arguments: str) -> tuple[int, str, str]:
        done: subprocess.CompletedProcess[str] = await asyncio.to_thread(self._plane.cli, *arguments)
        return done.returncode, done.stdout[-300:], done.stderr[-400:]

    async def _fleet(self) -> Fleet:
        return await fleet_of(self._plane)

    async def _until(self, true: Any, deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        while not true(await self._fleet()):
            if time.monotonic() > ends:
                raise TimeoutError
            await asyncio.sleep(0.05)

    def _up(self, fleet: Fleet, model: str) -> Instance:
        return next(one for one in fleet.instances.values() if one.model == model and one.rung is Rung.UP)

    async def _since(self, head: int) -> list[Recorded]:
        return [event for event in await events_of(self._plane) if event.position > head]

    async def _ups(self, head: int) -> list[Row]:
        events = await events_of(self._plane)
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

    def _users(self, device: str) -> dict[int, int]:
        if self._machine is None:
            return gpus.processes(device)
        from tests.standin.room import Room

        return Room(self._machine).processes(device)

    @contextlib.contextmanager
    def _held(self, after: int) -> Iterator[None]:
        """Played engines are quicker than a question: they say no more than so many ids meanwhile."""
        if self._machine is None:
            yield
            return
        from tests.standin.engine import HOLDS

        (self._machine / HOLDS).write_text(str(after))
        try:
            yield
        finally:
            (self._machine / HOLDS).unlink()


def _body(model: str, prompt: str, tokens: int) -> Row:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
