"""`bench ladder`: every way up to a first answer and every way down, in one run, beside cold starts of the same run."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from compose.bench import ladderreport
from compose.bench.laddersource import FAKE, Source, source_of
from compose.bench.ownplane import OwnPlane
from compose.bench.rows import Row, machine
from compose.bench.scene import SMALL
from compose.bench.shapes import SHAPES
from compose.bench.workplace import plane_place, workplace
from compose.refusal import ApiRefused
from worker.images import criu

MODEL: Final = "measured"
PROMPT: Final = "A kettle is "
"""Short of a block of a prefix cache in any tokenizer: what is cached is computed another way, and bf16 breaks ties by it."""
TOKENS: Final = 8
DOWN: Final = {"sleep": "sleep", "checkpoint": "checkpoint", "save": "saved"}
"""Operation -> the rung where it ends."""


@click.command()
@click.option("--shape", default=SMALL, show_default=True, metavar="NAME|DIR",
              help=f"{SMALL}: a small real model; {', '.join(SHAPES)}: random weights of real sizes; {FAKE}: no model, what "
                   "the plane itself costs; or the directory of a checkpoint.")  # fmt: skip
@click.option("--cycles", default=3, show_default=True, type=click.IntRange(1, 100), help="Of every way; medians are shown.")
@click.option("--arguments", default="{}", metavar="JSON", help="Arguments of the engine, over those of the shape.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Keep checkpoints here.  [default: nowhere]")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures here, too.")
def ladder(*, shape: str, cycles: int, arguments: str, work: Path | None, file: Path | None) -> None:
    """How long every way up to a first answer takes, and every way down: from sleep, checkpoint and disk, and cold.

    A plane of its own is started for it, and ended. All answers are compared. The first cold start reads and makes what later
    ones find; the warmest ones come last, with all files in memory.
    """
    try:
        chosen = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise click.BadParameter(f"--arguments is no JSON object: {error}") from None
    with workplace(work, longest=None) as place:
        rows = measure(source_of(shape, place, chosen), cycles, file)
    ladderreport.show(rows)
    if rows["failed"]:
        raise click.ClickException(rows["failed"])
    if not rows["same_answers"]:
        raise click.ClickException("answers differ: see the rows")


def measure(source: Source, cycles: int, file: Path | None = None) -> Row:
    """Everything, as one row; `file` has what there is of it after each round. `failed`: what ended it early."""
    rows: Row = {**machine(), "criu": _criu(), "shape": source.name, "engine": source.engine, "weights_bytes": source.bytes}
    rows |= {"arguments": source.arguments, "cycles": cycles}
    data = plane_place()
    with OwnPlane(data, source.settings(MODEL)) as plane:
        climber = Climber(plane, cycles)

        def keep(failed: str = "") -> Row:
            found = {**rows, **climber.found(), "failed": failed}
            if file is not None:
                file.write_text(json.dumps(found, indent=1) + "\n")
            return found

        try:
            plane.inspected(MODEL)
            for what in climber.climb():
                click.echo(what, err=True)
                keep()
        except (ApiRefused, OSError) as error:
            return keep(f"{type(error).__name__}: {error}\n{plane.words()}")
        return keep()


class Climber:
    """One plane's ways up and down; `ways` and `steps` collect what they took."""

    def __init__(self, plane: OwnPlane, cycles: int) -> None:
        self._plane, self._cycles = plane, cycles
        self._answers: dict[str, set[str]] = {}
        """Way -> what was answered after it."""
        self._checks: set[str] = set()
        self._position = 0
        self.ways: dict[str, list[float]] = {}
        """Way -> seconds."""
        self.steps: dict[str, dict[str, list[float]]] = {}
        """Way -> step -> milliseconds, by the worker's own report."""
        self.skipped: dict[str, str] = {}
        self._moved: dict[str, list[int]] = {}
        self._built: Row = {}
        self._host_bytes = 0
        """What the engine took of the host when it was last at `checkpoint`."""

    def climb(self) -> Iterator[str]:
        """Round by round; says what comes next."""
        yield "first cold start"
        self._up("first cold start")
        for _ in range(max(3, self._cycles)):
            self._up("up already")
        yield "image"
        if self._down("save", "up -> saved, its image built and proved"):
            self._built = self._image()
            self._up("saved, right after the build")
        for number in range(self._cycles):
            yield f"down and up, {number + 1} of {self._cycles}"
            for operation, rung in DOWN.items():
                if operation not in self.skipped and self._down(operation, f"up -> {rung}"):
                    self._up(rung)
        for number in range(self._cycles):
            yield f"warm cold start, {number + 1} of {self._cycles}"
            self._down("stop", "up -> cold")
            self._plane.remove_images()
            self._up("cold, warmest")

    def found(self) -> Row:
        """What there is so far."""
        return {
            "ways": {way: _spread(seconds) for way, seconds in self.ways.items()},
            "steps_ms": {
                way: {step: _spread(of) for step, of in found.items()} for way, found in self.steps.items() if found
            },
            "moved_bytes": {way: statistics.median(of) for way, of in self._moved.items()},
            "skipped": self.skipped, "image": self._built, "host_bytes": self._host_bytes, "checks": sorted(self._checks),
            "answers": {way: sorted(answers) for way, answers in self._answers.items()},
            "same_answers": len(set().union(*self._answers.values())) == 1
            and self._checks <= {"same_tokens", "recorded", "skipped"},
        }  # fmt: skip

    def _up(self, rung: str) -> None:
        answered = self._plane.ask(MODEL, PROMPT, TOKENS)
        way = f"{rung} -> first answer"
        self._answers.setdefault(way, set()).add(answered.text)
        self.ways.setdefault(way, []).append(answered.first_s)
        self._take_steps(way)

    def _down(self, operation: str, way: str) -> bool:
        """False: this machine can't; the reason is kept."""
        try:
            seconds = self._plane.operate(MODEL, operation)
        except ApiRefused as refused:
            if refused.code != "not_available":
                raise
            self.skipped[operation] = str(refused)
            self._plane.ask(MODEL, PROMPT, TOKENS)  # if it was ended by the attempt, it is up again for the others
            self._take_steps("")
            return False
        self.ways.setdefault(way, []).append(seconds)
        self._take_steps(way)
        return True

    def _take_steps(self, way: str) -> None:
        """What the worker reported of it; no way: what is no part of the measurement."""
        for event in self._plane.events(self._position):
            self._position, data = event["position"], event["data"]
            for step in data.get("steps", ()) if way else ():
                self.steps.setdefault(way, {}).setdefault(step["name"], []).append(step["took_ms"] / 1000)
                if moved := step.get("moved_bytes"):
                    self._moved.setdefault(f"{way}: {step['name']}", []).append(moved)
            self._host_bytes = data.get("host_bytes", self._host_bytes)
            if event["type"] == "InstanceUp":
                self._checks.add(data["check"])

    def _image(self) -> Row:
        (known,) = self._plane.client.get("api", "images")
        left = self._plane.engine_processes()
        return {"bytes": known["size_bytes"], "proof": known["proof"], "processes_left_when_saved": left}


def _spread(seconds: list[float]) -> Row:
    values = [round(one * 1000, 1) for one in seconds]
    return {"median_ms": statistics.median(values), "least_ms": min(values), "most_ms": max(values), "n": len(values)}


def _criu() -> str | None:
    found = criu.find(Path("/nonexistent"))
    return criu.probe(found).version if found is not None else None
