"""`bench move`: what it costs to take a live engine from one GPU to another, step by step, there and back."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table

from compose.bench.engineprocess import EngineProcess
from compose.bench.load import TOKENS
from compose.bench.rows import Row, machine, medians
from compose.bench.scene import Scene, Setting
from compose.bench.shapes import SHAPES
from compose.bench.workplace import workplace
from compose.refusal import EnvironmentRefusal
from worker import gpus
from worker.cuda.operation import Theatre, operate
from worker.cuda.surgeon import exchanged
from worker.engines.messages import Attach, Detach, Drain, Health, Moved, Sleep, Wake

STEP_S: Final = 60.0
OVER_COPY, MOVE_MS = 1.1, 400
"""What a move may take beside checkpoint and CUDA restore: the copy by this factor, and this."""


@click.command()
@click.option("--shape", default="8b", show_default=True, metavar="NAME", help=f"{', '.join(SHAPES)}.")
@click.option("--moves", default=6, show_default=True, type=click.IntRange(1, 1000), help="There and back in turn.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Keep checkpoints here.  [default: nowhere]")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures here, too.")
def move(*, shape: str, moves: int, work: Path | None, file: Path | None) -> None:
    """What it costs to take a live engine from one GPU to another: drained, unmapped, off the one and onto the other, mapped.

    Needs two GPUs of one host. Greedy tokens are compared after every move.
    """
    here = gpus.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if len(here) < 2:
        raise EnvironmentRefusal("few_gpus", f"A move needs two GPUs, and this machine has {len(here)}.", "Run it on one.")
    if shape not in SHAPES:
        raise click.BadParameter(f"{shape!r} is none of {', '.join(SHAPES)}.")
    with workplace(work) as place:
        rows = measure(Setting(shape=shape, source=None, devices=here, cycles=moves, alone=True, work=place), file)
    _show(rows)
    if not rows["median"]["same_tokens"]:
        raise click.ClickException("tokens differ: see the rows")


def measure(setting: Setting, file: Path | None) -> Row:
    """Every move in turn. `file` is written after each."""
    rows: Row = {**machine(), "device": setting.devices[0].name, "shape": setting.shape, "rows": []}
    with Scene(setting) as scene:
        scene.make()
        scene.start_pool()
        engine = scene.start_engine("one")
        weight_set, _ = scene.stage(engine, "a")
        attach = Attach(pool_socket=str(scene.socket), weight_set=weight_set)
        engine.tell(attach)
        engine.tell(Wake(model="a"))
        ids = engine.generate(TOKENS).ids
        for nth in range(setting.cycles):
            row = _move(engine, attach, setting.devices, nth)
            rows["rows"].append({**row, "same_tokens": engine.generate(TOKENS).ids == ids})
            rows["median"] = medians(rows["rows"][1:] or rows["rows"])
            if file is not None:
                file.write_text(json.dumps(rows, indent=1))
    return rows


def _move(engine: EngineProcess, attach: Attach, devices: tuple[gpus.Gpu, ...], nth: int) -> Row:
    """Milliseconds of each step; the first token counts over a warm one before."""
    source, target = devices[nth % 2], devices[1 - nth % 2]
    warm_ms = min(engine.generate(1).first_ms for _ in range(3))
    begun = time.monotonic()
    down = sum(engine.timed(order)[1] for order in (Drain(deadline_ms=5000), Sleep(), Detach()))
    mapping = exchanged(source.uuid, target.uuid, [one.uuid for one in devices])
    pid, verbs = engine.process.pid, ("lock", "checkpoint", "restore", "unlock")
    said = asyncio.run(operate(Theatre(), (pid,), verbs, deadline_s=STEP_S, devices=mapping))
    took = {one.verb: one.took_ms for one in said}
    engine.tell(Moved(device=target.uuid))
    up, attach_ms = engine.timed(attach)
    _, wake_ms = engine.timed(Wake(model="a"))
    added_ms = max(engine.generate(1).first_ms - warm_ms, 0)
    state = engine.tell(Health())
    return {
        "move_ms": (time.monotonic() - begun) * 1000 - warm_ms, "down_ms": down, "checkpoint_ms": took["checkpoint"],
        "restore_ms": took["restore"], "attach_ms": attach_ms, "copy_ms": up.copy_ms, "wake_ms": wake_ms,
        "first_token_added_ms": added_ms, "bytes_copied": up.bytes_copied, "there": state.bytes_device is not None,
        "left_bytes": gpus.processes(source.uuid).get(pid, 0), "to": target.index,
        "graphs": state.graphs, "graphs_again": state.graphs_again,
    }  # fmt: skip


def _show(rows: Row) -> None:
    console = Console(width=200, highlight=False, markup=False)
    table = Table(f"move, {rows['shape']}", "median", "least", "most", box=None, pad_edge=False, header_style="bold")
    median = rows["median"]
    for name in (
        "down_ms", "checkpoint_ms", "restore_ms", "attach_ms", "copy_ms", "wake_ms", "first_token_added_ms", "move_ms",
    ):  # fmt: skip
        middle, least, most = median[name]
        table.add_row(name.removesuffix("_ms").replace("_", " "), f"{middle:.1f} ms", f"{least:.1f}", f"{most:.1f}")
    console.print(table)
    goal = median["checkpoint_ms"][0] + median["restore_ms"][0] + OVER_COPY * median["copy_ms"][0] + MOVE_MS
    console.print(f"goal {goal:.0f} ms; greedy tokens the same everywhere: {'yes' if median['same_tokens'] else 'NO'}")
