"""A live model on two GPUs, as parts of a bench: it goes from one to the other, and a sleeper comes to the one that is free."""

import asyncio

import msgspec

from controlplane.fleet.members import FETCHED
from controlplane.rungs import Rung
from tests.bench.pairroom import PairRoom, Row
from tests.bench.planefigures import move_figure


class MoveParts:
    def __init__(self, room: PairRoom) -> None:
        self._room = room

    async def solo_up(self) -> Row:
        head = (await self._room.fleet()).position
        self._room.first["solo"], took_s = await self._room.ask("solo")
        return {
            "first_answer_s": took_s,
            "device": self._room.up(await self._room.fleet(), "solo").device,
            "up": await self._room.ups(head),
        }

    async def move(self) -> Row:
        """Asked before and while it moves. Its figure is from the directive to its being up, beside its own steps' goal."""
        fleet = await self._room.fleet()
        instance, head = self._room.up(fleet, "solo"), fleet.position
        target = next(one for one in fleet.devices.values() if one.device != instance.device and one.kind == "gpu")
        before = asyncio.create_task(self._room.ask("solo", 2, 64))
        await asyncio.sleep(0.02)
        moving = asyncio.create_task(self._room.cli("move", "solo", "--to", target.device))
        await self._room.until(lambda fleet: moving.done() or any(one.moving_to for one in fleet.instances.values()), 20)
        during = asyncio.create_task(self._room.ask("solo", 2, 64))
        moved, (one, waited), (other, waited_too) = await moving, await before, await during
        after = self._room.up(await self._room.fleet(), "solo")
        again, _ = await self._room.ask("solo")
        ups = [up for up in await self._room.ups(head) if up["model"] == "solo"]
        failed = [msgspec.to_builtins(e.event) for e in await self._room.since(head) if e.type == "InstanceFailed"]
        there, same = after.device == target.device, one == other and again == self._room.first["solo"]
        return {
            "figure": move_figure(ups[-1]) if ups else None, "there": there, "same": same, "waited_s": [waited, waited_too],
            "same_process": after.pid == instance.pid, "cli": moved, "failed_events": failed, "up": ups,
            "good": not moved[0] and there and same and not failed,
        }  # fmt: skip

    async def fetched(self) -> Row:
        """A sleeper whose GPU another model has taken whole comes to the free one; no skeleton is started for it."""
        room, instance = self._room, self._room.up(await self._room.fleet(), "solo")
        told = [await room.cli("sleep", "solo")]
        _, cold_s = await room.ask("whole")
        if room.up(await room.fleet(), "whole").device != instance.device:
            told.append(await room.cli("move", "whole", "--to", str(instance.device)))
        fleet = await room.fleet()
        head, sleeps = fleet.position, fleet.instances[instance.instance].rung is Rung.SLEEP  # or is off its GPU by now
        again, took_s = await room.ask("solo")
        fleet = await room.fleet()
        after, whole = room.up(fleet, "solo"), room.up(fleet, "whole")
        fetched = [one for one in await room.since(head) if getattr(one.event, "code", "") == FETCHED]
        same = again == room.first["solo"]
        came = after.pid == instance.pid and after.device != instance.device == whole.device
        return {
            "cold_s": cold_s, "answer_s": took_s, "same": same, "came": came, "slept": sleeps,
            "fetched": len(fetched), "told": told, "up": await room.ups(head),
            "good": same and came and len(fetched) == sleeps and not any(code for code, *_ in told),
        }  # fmt: skip

    async def audit(self) -> Row:
        audit = await self._room.cli("audit")
        return {"audit": audit, "good": not audit[0]}
