"""The watch over a plane's children: each is asked for a sign of life; one that is lost is killed and started anew.

All that a part knows is in the log, or is found again: none is worth more alive and dumb than dead.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from compose.child import Child
from compose.childstate import ALIVE
from compose.serverchild import ServerChild
from compose.signs import Ask
from compose.vigil import Patience, Standstill, Vigil, Vitals
from compose.vitals import vitals
from controlplane.uptime import uptime_s

TICK_S: Final = 1.0
PATIENCE: Final = "ENGINEHOUSE_PATIENCE"
"""JSON with other times than `vigil.Patience` has, in seconds: `{"frozen": 5}`. For tests, and for slow machines."""

log = structlog.get_logger("watch")


def patience() -> Patience:
    """Raises msgspec.ValidationError."""
    return msgspec.json.decode(os.environ.get(PATIENCE, "{}"), type=Patience)


@dataclass
class Turn:
    """Of one child."""

    pid: int
    """Who was asked last; 0: nobody is there."""
    vigil: Vigil


async def watch_all(children: Mapping[str, Child | ServerChild], asked: Mapping[str, Ask], limits: Patience) -> None:
    """Ask those for whom there is a question; for ever."""
    standstill = Standstill(uptime_s())
    async with asyncio.TaskGroup() as group:
        for name, ask in asked.items():
            group.create_task(watch(children[name], ask, limits, standstill), name=f"watch {name}")
        while True:
            await asyncio.sleep(TICK_S)
            standstill.tick(uptime_s())


async def watch(child: Child | ServerChild, ask: Ask, limits: Patience, standstill: Standstill) -> None:
    """Ask one child, over all its restarts; for ever, through faults of ours, too: while they last it is shown as unwatched."""
    turn = Turn(0, Vigil(limits, uptime_s()))
    while True:
        try:
            pause_s = await _look(child, ask, limits, standstill, turn)
        except Exception:  # e.g. too many open files just when it was to be killed; what was seen of it is kept
            pause_s = limits.every
            log.exception("not_watched", child=child.name, pid=turn.pid, again_in_s=pause_s)
            child.unwatched()
        await asyncio.sleep(pause_s)


async def _look(child: Child | ServerChild, ask: Ask, limits: Patience, standstill: Standstill, turn: "Turn") -> float:
    """Ask once. Returns the seconds until the next time."""
    state = child.state
    if state.pid is None or state.state not in ALIVE:
        turn.pid = 0
        return limits.every
    if state.pid != turn.pid:
        turn.pid, turn.vigil = state.pid, Vigil(limits, uptime_s())
    began = uptime_s()
    sign = await _asked(child, ask, turn.pid, limits.answer)
    if sign is False and standstill.within(began, uptime_s()):
        sign = None
    seen = _seen(child, turn.pid) if sign is False else None
    if child.state.pid != turn.pid:  # it has ended meanwhile, and its keeper knows
        return 0.0
    if seen is not None:
        await _missed(child, turn.pid, turn.vigil, seen)
        return max(0.0, limits.answer - (uptime_s() - began))  # a refusal at once is no reason to hurry
    if sign:
        turn.vigil.answered(uptime_s())
    else:
        turn.vigil.excused(uptime_s())
    if child.silent(0):
        log.warning("child_answers_again" if sign else "child_not_asked", child=child.name, pid=turn.pid)
    return limits.every


async def _missed(child: Child | ServerChild, pid: int, vigil: Vigil, seen: Vitals) -> None:
    """Show that it is silent; end it if that has lasted too long."""
    verdict = vigil.missed(uptime_s(), seen)
    if vigil.silent_s and child.silent(vigil.silent_s):  # one that is excused for once has not answered either
        log.warning("child_silent", child=child.name, pid=pid, silent_s=round(vigil.silent_s), process=seen.state)
    if verdict is not None:
        log.error("child_lost", child=child.name, pid=pid, reason=verdict)
        await child.give_up(verdict)


def _seen(child: Child | ServerChild, pid: int) -> Vitals | None:
    """None: it is gone, or can't be looked at, and nothing follows from that."""
    try:
        return vitals(pid)
    except OSError as error:  # e.g. too many open files of ours
        log.error("not_looked_at", child=child.name, pid=pid, error=repr(error))
        return None


async def _asked(child: Child | ServerChild, ask: Ask, pid: int, deadline_s: float) -> bool | None:
    try:
        return await ask(pid, deadline_s)
    except Exception as error:  # a fault of ours is not the child's, and must not end the watch
        log.error("not_asked", child=child.name, error=repr(error))
        return None
