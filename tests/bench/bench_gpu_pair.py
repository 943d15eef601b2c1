"""A whole plane on two GPUs: a gang over both, which leaves them and comes back, and of which one rank never answers and one is
killed; a live model that goes from one to the other and back, a sleeper that comes to the one that is free.

`python -m tests.bench.bench_gpu_pair --shape 1.5b --work DIR --json FILE [--seconds 180] [--logs FILE]`

Each part is written to FILE as it ends, beside what it is to be compared with; one that fails costs its own figures alone.
Where time runs out the last parts are left out, and say so. `--standin`: on two played GPUs, to try this program itself.
"""

import argparse
import asyncio
import json
import logging
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from tests.bench.gangparts import GangParts
from tests.bench.pairmodels import MODELS, settings
from tests.bench.pairparts import MoveParts
from tests.bench.pairroom import PairRoom
from tests.bench.planefigures import words
from tests.planeprocesses import PlaneProcesses

BEGUN = time.monotonic()
END_S = 12.0
"""Kept for the end of the plane, its audit with it."""


class Notes:
    """What has been found, on the screen and in a file, part by part."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.found: dict[str, Any] = {}
        self._file, self._ends = file, BEGUN + seconds

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic() - END_S

    def note(self, what: str, found: Any) -> None:
        self.found[what] = found
        self._file.write_text(json.dumps(self.found, indent=1, default=str))
        print(f"[{time.monotonic() - BEGUN:6.1f}] {what}: {json.dumps(found, default=str)[:1500]}", flush=True)

    async def part(
        self, what: str, work: Callable[[], Awaitable[Any]], *, needs_s: float, limit_s: float = 60, after: str = ""
    ) -> None:
        """`after`: a part without whose success this one can't be."""
        if after and not succeeded(self.found.get(after, {})):
            self.note(what, {"left_out": f"{after} failed or was left out"})
            return
        if self.left_s < needs_s:
            self.note(what, {"left_out": f"{self.left_s:.0f} s are left, {needs_s:.0f} are needed"})
            return
        begun = time.monotonic()
        try:
            async with asyncio.timeout(min(self.left_s, limit_s)):
                found = await work()
        except Exception:
            found = {"failed": traceback.format_exc()[-2500:]}
        self.note(what, {**found, "seconds": round(time.monotonic() - begun, 1)})


async def measured(plane: PlaneProcesses, notes: Notes, machine: Path | None, moves: int) -> None:
    room = PairRoom(plane, machine)
    gang, solo = GangParts(room), MoveParts(room)
    cold_s = 45 if machine is None else 5
    await notes.part("gang up", gang.gang_up, needs_s=20, limit_s=120)
    for number in range(3):
        await notes.part(f"gang cycle {number}", gang.gang_cycle, needs_s=8, after="gang up")
    await notes.part("owners", gang.owners, needs_s=4)
    for number in range(2):
        await notes.part(f"gang off and back {number}", gang.gang_off, needs_s=20, limit_s=90, after="gang up")
    await notes.part("rank stopped", gang.rank_stopped, needs_s=40, limit_s=150, after="gang up")
    await notes.part("solo up", solo.solo_up, needs_s=20, limit_s=100)
    for number in range(moves):
        await notes.part(f"move {number}", solo.move, needs_s=10, after="solo up")
    await notes.part("fetched", solo.fetched, needs_s=cold_s, limit_s=80, after="solo up")
    await notes.part("gang after all", gang.gang_again, needs_s=cold_s, limit_s=120, after="gang up")
    await notes.part("rank killed", gang.rank_killed, needs_s=10, after="gang after all")
    await notes.part("audit", solo.audit, needs_s=0)


def succeeded(row: dict[str, Any]) -> bool:
    return bool(row) and "failed" not in row and "left_out" not in row and bool(row.get("good", True))


def good(found: dict[str, Any]) -> dict[str, bool]:
    """By part; those that were left out are not named."""
    return {what: succeeded(row) for what, row in found.items() if "left_out" not in row}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.bench.bench_gpu_pair")
    parser.add_argument("--shape", default="1.5b", help="of the model that moves")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=180, help="it ends within")
    parser.add_argument("--moves", type=int, default=4)
    parser.add_argument("--standin", action="store_true")
    parser.add_argument("--logs", type=Path, help="where the ends of the plane's logs go")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))  # a question is a connection
    notes = Notes(options.json, options.seconds)
    text, environment, machine = settings(options.work, options.shape, standin=options.standin)
    notes.note("models", dict.fromkeys(MODELS, "made"))
    plane = PlaneProcesses(text, environment=environment)
    try:
        plane.launch()
        plane.wait_ready(90)
        notes.note("up", {"there": True})
        asyncio.run(measured(plane, notes, machine, options.moves))
    except BaseException:
        notes.note("ended early", {"failed": traceback.format_exc()[-2500:]})
    finally:
        if options.logs is not None:
            options.logs.write_text(words(plane))
        try:
            plane.finish()
            notes.note("end", {"there": True})
        except BaseException:
            notes.note("end", {"failed": traceback.format_exc()[-2500:]})
    judged = good(notes.found)
    notes.note("good", judged)
    return 0 if all(judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
