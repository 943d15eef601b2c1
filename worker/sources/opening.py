"""The process that opens a source: `python -m worker.sources.opening --source S --models DIR --target NAME --arguments JSON`.

It loads torch and may load a whole model, so it is not the worker. It ends by itself, by its parent's deadline, or with it.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from pool.messages import Tensor
from pool.safetensors import BadSource, Source, read_source
from worker import tether
from worker.engines.interface import EngineFault
from worker.engines.kv import Unsuited, kv_shape
from worker.engines.skeleton import Skeleton
from worker.sources.configuration import normalised
from worker.sources.convert import from_directory, from_gguf
from worker.sources.hub import fetch
from worker.sources.ownlayout import open_own
from worker.sources.report import CantUse, Inspected, Refused, say

NEEDED: Final = ("config.json", "tokenizer.json")


def open_source(source: str, models: Path, target: str, arguments: dict[str, Any]) -> Inspected:
    """Return what is to be known of `source`; converted weights go to `models/target`.

    Raises:
        CantUse.
    """
    dtype = torch.bfloat16 if arguments.get("dtype") == "bfloat16" else torch.float32
    if source.startswith("hf:"):
        directory = fetch(source, models)
    elif source.endswith(".gguf"):
        directory = from_gguf(Path(source), models / target, dtype)
    else:
        directory = Path(source).resolve(strict=True)
    converted = models / target
    if not fits(directory, dtype) and directory != converted:
        directory = from_directory(directory, converted, dtype)
    skeleton, weights = opened(directory, dtype)
    try:
        shape = kv_shape(skeleton.config, arguments, dtype.itemsize)
        chosen = skeleton.chosen(tensors(weights))
    except Unsuited as error:
        raise CantUse("cannot_fit", str(error)) from error
    except EngineFault as fault:
        raise CantUse("bad_source", fault.message) from fault
    return Inspected(
        source_dir=str(directory), architecture=type(skeleton.model).__name__, skeleton=normalised(skeleton.config),
        parameters=sum(parameter.numel() for parameter in skeleton.model.parameters()),
        weight_bytes=sum(tensor.size_bytes for tensor in chosen), kv_bytes=shape.size_bytes,
        context_tokens=shape.context_tokens, max_num_seqs=shape.slots,
    )  # fmt: skip


def fits(directory: Path, dtype: torch.dtype) -> bool:
    """Whether an engine can map the directory as it is: names, shapes and dtype are the skeleton's, a tokenizer is there."""
    if not all((directory / name).exists() for name in NEEDED):
        return False
    try:
        skeleton, weights = opened(directory, dtype)
        skeleton.chosen(tensors(weights))
    except EngineFault:
        return False
    return True


def opened(directory: Path, dtype: torch.dtype) -> tuple[Skeleton, Source]:
    """Return the skeleton and what the weights' headers say. Raises CantUse."""
    try:
        weights = read_source(str(directory))
    except BadSource as error:
        raise CantUse("bad_source", str(error)) from error
    try:
        return Skeleton(directory, dtype), weights
    except (OSError, ValueError, KeyError) as error:
        raise CantUse("bad_source", f"{directory / 'config.json'}: {error}") from error


def tensors(weights: Source) -> list[Tensor]:
    return [
        Tensor(name=one.name, dtype=one.dtype, shape=one.shape, segment=0, offset=0, size_bytes=one.size_bytes, digest="")
        for one in weights.entries
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="worker.sources.opening")
    parser.add_argument("--source", required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--arguments", default="{}")
    parser.add_argument("--own-layout", action="store_true", help="for an engine that loads files itself")
    parser.add_argument("--parent", type=int, help="pid of whoever waits for it, without whom it ends")
    options = parser.parse_args()
    tether.die_with(options.parent or os.getppid())  # it may be dead by now: to import what is needed takes seconds
    os.nice(5)  # streams of running models go first
    try:
        arguments = msgspec.json.decode(options.arguments)
        if options.own_layout:
            say(open_own(options.source, options.models, arguments))
        else:
            say(open_source(options.source, options.models, options.target, arguments))
    except CantUse as refused:
        say(Refused(code=refused.code, message=refused.message, final=refused.final))
    except OSError as error:
        where = error.filename or options.source
        say(Refused(code="bad_source", message=f"{where}: {error.strerror or error}", final=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
