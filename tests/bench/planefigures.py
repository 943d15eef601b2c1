"""What a plane did, from its log, and what it says of its devices against what their driver says."""

import asyncio
import time
from collections import Counter
from typing import Any, Final

import asyncpg
import msgspec

from controlplane.bus import Bus
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet
from controlplane.log.postgres import COLUMNS, recorded
from controlplane.parties import DECIDER
from controlplane.rungs import Rung
from controlplane.subjects import NodeBeat
from tests.planeprocesses import PlaneProcesses

SLACK_BYTES = 64 << 20
"""Between what a sleeper was measured to use when it fell asleep and what it uses at the end."""
OVER_COPY: Final = 1.1
MOVE_MS: Final = 400.0
"""Of the goal of a move: these times the copy, and this much besides."""


async def fleet_of(plane: PlaneProcesses) -> Fleet:
    bus = await Bus.connect(plane.plane, "bench", DECIDER)
    try:
        return await bus.state(timeout_s=30)
    finally:
        await bus.close()


async def beat_of(plane: PlaneProcesses, after_s: float = 2.5) -> NodeBeat:
    bus = await Bus.connect(plane.plane, "bench", DECIDER)
    heard: list[NodeBeat] = []

    async def hear(message: Any) -> None:
        heard.append(msgspec.json.decode(message.data, type=NodeBeat))

    try:
        await bus.nc.subscribe("beat.node.*", cb=hear)
        await asyncio.sleep(after_s)
    finally:
        await bus.close()
    return heard[-1]


async def events_of(plane: PlaneProcesses) -> list[Recorded]:
    connection = await asyncpg.connect(plane.plane.postgres_url)
    try:
        rows = await connection.fetch(f"select {COLUMNS} from event order by position")
    finally:
        await connection.close()
    return [recorded(row) for row in rows]


async def asleep(plane: PlaneProcesses) -> bool:
    """Whether all of its instances sleep within a minute."""
    until = time.monotonic() + 60
    while not all(one.rung is Rung.SLEEP for one in (await fleet_of(plane)).instances.values()):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.2)
    return True


async def figures_of(
    plane: PlaneProcesses, ended: list[dict[str, Any]], known: dict[str, list[str]], took_s: float
) -> dict[str, Any]:
    fleet, beat, events = await fleet_of(plane), await beat_of(plane), await events_of(plane)
    unlike = [row for row in ended if row["status"] == 200 and row["text"] != known[row["model"]][row["prompt"]]]
    ups: list[Any] = [one.event for one in events if one.type == "InstanceUp"]
    slept = sum(one.bytes_used for one in fleet.instances.values() if one.rung is Rung.SLEEP)
    owners = {device: msgspec.to_builtins(owner) for device, owner in beat.owners.items()}
    skeletons = sum(owner.skeletons for owner in beat.owners.values())
    waits = sorted(row["took_s"] for row in ended)
    figures = {
        "requests": len(ended), "ended_200": sum(row["status"] == 200 for row in ended), "took_s": round(took_s, 1),
        "other_ends": [row for row in ended if row["status"] != 200][:10],
        "unlike": [row | {"known": known[row["model"]][row["prompt"]]} for row in unlike][:10], "unlike_count": len(unlike),
        "failures": [msgspec.to_builtins(one.event) for one in events if one.type in ("InstanceFailed", "ModelSetBack")],
        "events": Counter(one.type for one in events),
        "climbs": [{"model": up.model, "took_ms": up.took_ms, "bytes_mapped": up.bytes_mapped, "bytes_used": up.bytes_used,
                    "check": up.check, "steps": {step.name: round(step.took_ms, 1) for step in up.steps}} for up in ups],
        "wait_s": {"median": waits[len(waits) // 2], "p95": waits[len(waits) * 95 // 100], "most": waits[-1]},
        "fold_asleep_bytes": slept, "driver_skeleton_bytes": skeletons, "owners": owners, "device_bytes": beat.device_bytes,
        "weights": {one.weight_set: one.size_bytes for one in fleet.weights.values()},
        "instances": {name: {"rung": str(one.rung), "bytes_used": one.bytes_used} for name, one in fleet.instances.items()},
    }  # fmt: skip
    clean = not any(o.kv or o.own_weights or o.pool_sets or o.foreign for o in beat.owners.values())
    figures["good"] = {
        "every request ended": len(ended) == figures["ended_200"],
        "every answer is a fresh one's": not unlike,
        "nothing failed": not figures["failures"],
        "the fold is the driver's": clean and abs(slept - skeletons) <= SLACK_BYTES,
    }
    return figures


def move_figure(up: dict[str, Any]) -> dict[str, Any]:
    """The goal of a move follows from what its driver's calls and its copy took, by the same climb's steps."""
    steps = up["steps"]
    copy_ms = max(steps.get("fill", 0), steps.get("attach", 0))
    goal = steps.get("checkpoint", 0) + steps.get("cuda_restore", 0) + OVER_COPY * copy_ms + MOVE_MS
    return {"whole_ms": up["whole_ms"], "goal_ms": round(goal, 1), "met": up["whole_ms"] <= goal}


def words(plane: PlaneProcesses) -> str:
    """The ends of its logs, engines' included."""
    files = [*sorted((plane.data / "logs").rglob("*.log")), *sorted((plane.data / "run" / "inst").rglob("*.log"))]
    return "\n".join(f"--- {file.relative_to(plane.data)}\n{file.read_text(errors='replace')[-12000:]}" for file in files)
