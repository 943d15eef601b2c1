"""`bench swap`: what it costs to swap a model in and out on this machine, step by step, beside what others' swaps cost."""

import json
import os
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from compose.bench import swapreport
from compose.bench.rows import Row, machine
from compose.bench.scene import SMALL, Scene, Setting
from compose.bench.shapes import SHAPES
from compose.bench.swapparts import SwapParts
from compose.bench.workplace import workplace
from compose.refusal import EnvironmentRefusal
from worker import gpus

AGAINST: Final = ("vllm-l1", "vllm-l2", "vllm-b")
"""Plain vLLM's cycles of its two sleep levels, and a fresh one on the second checkpoint, whose tokens are compared."""
MORE: Final = ("switches", "newcomer", "throughput", "artefacts")
"""Parts that are measured unless others are named; cycles always are."""

Part = Callable[[str, Callable[[], Row]], None]


@click.command()
@click.option("--shape", default="8b", show_default=True, metavar="NAME|DIR",
              help=f"{', '.join(SHAPES)}: random weights of real sizes, on a GPU; {SMALL}: a small real model, without one; "
                   "or the directory of a checkpoint.")  # fmt: skip
@click.option("--against", default="", metavar="LIST", help=f"Plain vLLM, too: {', '.join(AGAINST)} (tokens of b).")
@click.option("--gpus", "number", default=1, show_default=True, type=click.IntRange(1, 16),
              help="GPUs whose links may bring weights.")  # fmt: skip
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1, 16),
              help="GPUs that the model is cut over: tensor parallel, each rank with weights of its own.")  # fmt: skip
@click.option(
    "--cycles", default=7, show_default=True, type=click.IntRange(1, 1000), help="Measured ones; one more comes first."
)
@click.option("--parts", default=",".join(MORE), show_default=True, metavar="LIST", help="What else is measured.")
@click.option("--arguments", default="{}", metavar="JSON", help="Arguments of the engine, over those of the shape.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Keep checkpoints here.  [default: nowhere]")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write all figures here, too.")
def swap(
    *, shape: str, against: str, number: int, ranks: int, cycles: int, parts: str, arguments: str, work: Path | None,
    file: Path | None,
) -> None:  # fmt: skip
    """What it costs to swap a model in and out, step by step; greedy tokens are compared at every step.

    Needs room for the checkpoints of the shape in the file system and in memory: 8b writes two of 15 GB.
    """
    others, more = _among("--against", against, AGAINST), _among("--parts", parts, MORE)
    chosen = _object(arguments)
    source, devices = Path(shape).resolve() if _is_directory(shape) else None, _devices(shape, max(number, ranks))
    with workplace(work) as place:
        setting = Setting(
            shape="" if source else shape, source=source, devices=devices, ranks=ranks, cycles=cycles, arguments=chosen,
            work=place,
        )  # fmt: skip
        rows = measure(setting, others, more, file)
    swapreport.show(rows)
    if failed := [name for name, row in rows["parts"].items() if "failed" in row]:
        raise click.ClickException(f"{', '.join(failed)} failed: {rows['parts'][failed[0]]['failed'][-1000:]}")
    if not swapreport.same_tokens(rows):
        raise click.ClickException("tokens differ: see the rows")


def measure(setting: Setting, others: list[str], more: list[str], file: Path | None) -> Row:
    """Every part in turn; one that fails costs its own figures alone. `file` is written after each."""
    device = setting.devices[0].name if setting.devices else "cpu"
    rows: Row = {
        **machine(),
        "device": device,
        "gpus": len(setting.devices),
        "ranks": setting.ranks,
        "shape": setting.shape or str(setting.source),
    }
    rows |= {"arguments": {}, "parts": {}}

    def part(name: str, work: Callable[[], Row]) -> None:
        begun = time.monotonic()
        click.echo(f"{name} ...", err=True)
        try:
            found = work()
        except EnvironmentRefusal:
            raise
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[-4000:]}
        rows["parts"][name] = {**found, "seconds": round(time.monotonic() - begun, 2)}
        if file is not None:
            file.write_text(json.dumps(rows, indent=1))

    with Scene(setting) as scene:
        swap_of = SwapParts(scene)
        rows["arguments"] = scene.arguments
        part("checkpoints", scene.make)
        if setting.devices:
            part("bus", swap_of.bus)
        scene.start_pool()
        part("start", swap_of.start)
        if "failed" in rows["parts"]["start"]:
            return rows
        for name in scene.sources:
            part(f"stage {name}", lambda name=name: swap_of.stage(name))  # type: ignore[misc]
            part(f"cycles {name}", lambda name=name: swap_of.cycles(name))  # type: ignore[misc]
        if "switches" in more and len(scene.sources) > 1:
            part("switches", lambda: swap_of.switches(resident=False))
            if setting.devices and setting.ranks == 1:
                part("switches, both resident", lambda: swap_of.switches(resident=True))
        _beside(swap_of, part, setting, others, more)
    return rows


def _beside(swap_of: SwapParts, part: Part, setting: Setting, others: list[str], more: list[str]) -> None:
    """What needs a GPU and compares: with plain vLLM, with a second engine, with starts."""
    if not setting.devices:
        return
    try:
        if others and set(others) != {"vllm-b"}:
            part("plain vLLM", swap_of.start_plain)
        if "throughput" in more:
            part("throughput", swap_of.throughput)
        for level in (1, 2):
            if f"vllm-l{level}" in others:
                part(f"plain vLLM, level {level}", lambda level=level: swap_of.level(level))  # type: ignore[misc]
    finally:
        swap_of.end()
    if "newcomer" in more:
        part("newcomer", swap_of.newcomer)
    swap_of.engine.end()
    if "artefacts" in more:
        part("artefacts", swap_of.artefacts)
    if "vllm-b" in others and len(swap_of.scene.sources) > 1:
        part("plain vLLM, b", swap_of.plain_b)


def _devices(shape: str, number: int) -> tuple[gpus.Gpu, ...]:
    """The GPUs to measure; none for what the Transformers engine can do without.

    Raises EnvironmentRefusal, click.BadParameter for what is no shape.
    """
    if shape != SMALL and shape not in SHAPES and not _is_directory(shape):
        raise click.BadParameter(
            f"{shape!r} is neither a directory with a config.json nor one of {', '.join(SHAPES)}, {SMALL}."
        )
    here = gpus.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not here:
        if shape == SMALL or _is_directory(shape):
            return ()
        raise EnvironmentRefusal(
            "no_gpu", f"Shape {shape!r} needs a GPU, and the driver shows 0 here.",
            f"Run it on a machine with one, or measure the Transformers engine: --shape {SMALL}.",
        )  # fmt: skip
    if shape == SMALL:
        return ()
    if number > len(here):
        raise EnvironmentRefusal("few_gpus", f"--gpus {number}, and this machine has {len(here)}.", "Ask for fewer.")
    if missing := [name for name in ("vllm", "cuda") if find_spec(name) is None]:
        raise EnvironmentRefusal("not_installed", f"{' and '.join(missing)} not found.", "pip install 'enginehouse[gpu]'.")
    return here[:number]


def _is_directory(shape: str) -> bool:
    return (Path(shape) / "config.json").is_file()


def _among(option: str, given: str, known: tuple[str, ...]) -> list[str]:
    names = [name for name in given.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"{option}: {', '.join(unknown)} is not among {', '.join(known)}.")
    return names


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise click.BadParameter(f"--arguments is no JSON object: {error}") from None
