"""A gang over two GPUs, as parts of a bench: up, down and up again; a rank that is killed, and one that never answers."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Final

import msgspec

from controlplane.events import InstanceFailed
from controlplane.fleet import Instance
from controlplane.rungs import Activity
from tests.bench.pairroom import PairRoom, Row
from tests.bench.planefigures import beat_of
from tests.bench.planemodels import prompts_of
from worker.processes import in_session

BACK_S: Final = 5.0
"""Within this, everything of a gang is back whose rank was killed."""
LONG: Final = 900
"""Tokens: two seconds of a tiny model. Played ones have no room for so many, and are held instead."""
LONG_PLAYED: Final = 100


class GangParts:
    def __init__(self, room: PairRoom) -> None:
        self._room = room
        self._again = 0
        """CUDA graphs that the gang has captured again so far."""

    async def gang_up(self) -> Row:
        self._room.first["pair"], took_s = await self._room.ask("pair")
        instance = self._room.up(await self._room.fleet(), "pair")
        users = {device: sorted(self._room.users(device)) for device in instance.devices}
        return {
            "first_answer_s": took_s, "devices": instance.devices, "grants": instance.grants, "weights": instance.weight_set,
            "users": users, "up": await self._room.ups(0), "good": len(instance.devices) == 2,
        }  # fmt: skip

    async def gang_cycle(self) -> Row:
        head = (await self._room.fleet()).position
        slept = await self._room.cli("sleep", "pair")
        again, took_s = await self._room.ask("pair")
        ups = await self._room.ups(head)
        same = again == self._room.first["pair"]
        counted = [up["graphs_again"] for up in ups]
        return {"sleep": slept, "answer_s": took_s, "same": same, "up": ups, "good": same and counted == [0] and not slept[0]}

    async def gang_off(self) -> Row:
        """Off both GPUs, and back with its communicators and graphs made anew, each of these counted. It may come back by a
        cold start, and then it answers, too; but that is not what is asked for here.
        """
        room, instance = self._room, self._room.up(await self._room.fleet(), "pair")
        ranks, head = self._ranks(instance), (await self._room.fleet()).position
        begun = time.monotonic()
        told = await room.cli("checkpoint", "pair")
        off_s = round(time.monotonic() - begun, 2)
        there = {pid for pids in ranks.values() for pid in pids}
        memory = {device: sum(size for pid, size in room.users(device).items() if pid in there) for device in ranks}
        again, took_s = await room.ask("pair")
        same, ups = again == room.first["pair"], await room.ups(head)
        by = set(ups[0]["steps"]) & {"cuda_restore", "start_engine"}
        counted = ups[0]["graphs_again"] == self._again + ups[0]["graphs"]
        self._again = ups[0]["graphs_again"]
        return {
            "told": told, "off_s": off_s, "memory": memory, "answer_s": took_s, "same": same, "by": sorted(by), "up": ups,
            "good": not told[0] and not any(memory.values()) and same and counted and by == {"cuda_restore"},
        }  # fmt: skip

    async def owners(self) -> Row:
        """The plane's word of each device's memory beside the driver's."""
        beat = await beat_of(self._room.plane)
        return {
            "owners": {device: msgspec.to_builtins(owner) for device, owner in beat.owners.items()},
            "driver_bytes": {device: sum(self._room.users(device).values()) for device in beat.owners},
            "good": not any(owner.foreign for owner in beat.owners.values()),
        }

    async def rank_killed(self) -> Row:
        """N7, in the middle of an answer: it is told, and cells, processes and memory of both GPUs are back."""
        room, instance = self._room, self._room.up(await self._room.fleet(), "pair")
        ranks, tokens = self._ranks(instance), LONG if room.machine is None else LONG_PLAYED
        with room.held(after=5):
            async with room.streamed("pair", prompts_of("pair")[1], tokens) as lines:
                said = [await anext(lines)]
                head, begun = (await room.fleet()).position, time.monotonic()
                os.kill(ranks[instance.devices[-1]][0], signal.SIGKILL)
                said += [line async for line in lines]
        told_s = time.monotonic() - begun
        row = await self._gone(instance, ranks, head, begun)
        back = row["clean"] and row["back_s"] <= BACK_S
        return {
            "lines": len(said), "said_last": said[-1][:300], "told_s": round(told_s, 2), "goal_s": BACK_S, **row,
            "good": "engine_died" in said[-1] and len(row["failures"]) == 1 and back,
        }  # fmt: skip

    async def rank_stopped(self) -> Row:
        """C26, in the middle of a wake: a rank that never answers ends the gang at its step's deadline, and who waits behind
        it is served.
        """
        room, instance = self._room, self._room.up(await self._room.fleet(), "pair")
        ranks, slept = self._ranks(instance), await self._room.cli("sleep", "pair")
        head, begun = (await room.fleet()).position, time.monotonic()
        os.kill(ranks[instance.devices[-1]][0], signal.SIGSTOP)
        asked = asyncio.create_task(room.ask("pair"))
        await room.until(lambda fleet: fleet.instances[instance.instance].activity is Activity.CLIMBING, 10)
        behind = asyncio.create_task(room.ask("solo"))
        row = await self._gone(instance, ranks, head, begun)
        (text, behind_s), (again, asked_s) = await behind, await asked
        same, failures = again == room.first["pair"], [one["code"] for one in row["failures"]]
        return {
            "slept": slept, **row, "behind": {"text": text[:40], "took_s": behind_s},
            "asked": {"same": same, "took_s": asked_s},
            "good": not slept[0] and failures == ["step_deadline"] and row["clean"] and same,
        }  # fmt: skip

    def _ranks(self, instance: Instance) -> dict[str, list[int]]:
        """Its processes on each of its devices."""
        record = json.loads((self._room.plane.data / "run" / "inst" / instance.instance / "instance.json").read_text())
        own = {process.pid for process in in_session(record["engine"]["pid"])}
        return {device: [pid for pid in self._room.users(device) if pid in own] for device in instance.devices}

    async def _gone(self, instance: Instance, ranks: dict[str, list[int]], head: int, begun: float) -> Row:
        """What its failure was, and how long until nothing of it was there; what of it is left."""
        room, wall = self._room, time.time() - (time.monotonic() - begun)
        await room.until(lambda fleet: instance.instance not in fleet.instances, 60)
        failed = [event for event in await room.since(head) if isinstance(event.event, InstanceFailed)]
        there = {pid for pids in ranks.values() for pid in pids}
        while (left := [pid for pid in there if _alive(pid)]) and time.monotonic() < begun + 60:
            await asyncio.sleep(0.05)
        back_s = time.monotonic() - begun
        grants = [g.number for g in (await room.fleet()).grants.values() if g.instance == instance.instance]
        memory = {device: {pid: size for pid, size in room.users(device).items() if pid in there} for device in ranks}
        told = [
            {"after_s": round(one.at_ms / 1000 - wall, 2), "step": one.event.step, "code": one.event.code}
            for one in failed
            if isinstance(one.event, InstanceFailed)
        ]
        return {
            "ranks": ranks, "failures": told, "back_s": round(back_s, 2), "left": left, "grants": grants, "memory": memory,
            "clean": not left and not grants and not any(memory.values()),
        }  # fmt: skip

    async def gang_again(self) -> Row:
        head = (await self._room.fleet()).position
        again, took_s = await self._room.ask("pair")
        same = again == self._room.first["pair"]
        return {"answer_s": took_s, "same": same, "up": await self._room.ups(head), "good": same}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
