"""Sources that were fetched, converted or made here, `DIR/models/<kind>-<digest>`: which a model needs, and how they go.

Nothing notes whose they are: their names follow from the model's spec, and from the files that it names.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

import msgspec

from controlplane.spec import ModelSpec
from worker.sources.fakes import WEIGHT_BYTES
from worker.sources.identity import SourceRefused, identity
from worker.sources.places import DRAFT, converted, fetched, pretended
from worker.sources.report import Inspected

CONVERTED: Final = "converted-"
UNNEEDED: Final = "unneeded.json"
"""In `DIR/models`: name -> Unix seconds since when nothing needs it, so that planes that live shorter than that sweep, too."""
_NAME: Final = re.compile(r"(?:hf|converted|fake)-[0-9a-f]{24}")


def prepared(models: Path) -> set[str]:
    """Names of all that were ever prepared and are there still; whatever else lies in `DIR/models` is not ours to judge."""
    with contextlib.suppress(FileNotFoundError):
        return {path.name for path in models.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()}
    return set()


def needed(specs: Iterable[ModelSpec], models: Path, there: Collection[str]) -> set[str]:
    """Those of `there` that such models have, or may have: of a source that can't be looked at now, any that is converted."""
    names = set[str]()
    for spec in specs:
        try:
            names |= _of(spec, models)
        except SourceRefused:
            names |= {name for name in there if name.startswith(CONVERTED)}
            names |= _named(spec, models)
    return names & set(there)


def _of(spec: ModelSpec, models: Path) -> set[str]:
    """Raises SourceRefused."""
    if spec.engine == "fake":
        return _named(spec, models)
    dtype = str(spec.arguments.get("dtype", "float32"))  # as `prepare` has it
    return _named(spec, models) | {converted(identity(spec.source), dtype)}


def _named(spec: ModelSpec, models: Path) -> set[str]:
    """What is known without a look at the source."""
    if spec.engine == "fake":
        size = int(spec.arguments.get("weight_bytes", WEIGHT_BYTES))
        return {pretended(spec.source.removeprefix("fake:") or spec.name, size)}
    named = [str(source) for source in (spec.source, spec.arguments.get("draft_model")) if source is not None]
    resolved = [os.path.realpath(source) for source in named if os.path.isabs(source)]  # a link may lead into ours
    return {fetched(source) for source in named if source.startswith("hf:")} | within(models, [*named, *resolved])


def within(models: Path, paths: Iterable[str]) -> set[str]:
    """Names of the directories of `models` that the paths lead into."""
    roots = {os.path.abspath(models), os.path.realpath(models)}
    found = set[str]()
    for path in paths:
        for root in roots:
            if path.startswith(f"{root}/"):
                found.add(path[len(root) + 1 :].partition("/")[0])
    return found


def put_aside(models: Path, names: Iterable[str]) -> dict[str, Path]:
    """Where they are from now on, no prepared sources any more. What is not removed from there is swept up at the next start.

    Nothing may be prepared meanwhile. Raises OSError.
    """
    aside = dict[str, Path]()
    for name in names:
        leaving = models / f"{DRAFT}{name}-leaves"
        shutil.rmtree(leaving, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            (models / name).rename(leaving)
            aside[name] = leaving
    for note in models.glob("inspected-*.json"):
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            source = msgspec.json.decode(note.read_bytes(), type=Inspected).source_dir
            if within(models, (source,)) and not Path(source).is_dir():
                note.unlink()
    return aside


def size_bytes(directory: Path) -> int:
    """Of all its files; what vanishes meanwhile counts for nothing."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def note(models: Path, since: dict[str, float]) -> None:
    """Write down for the next worker since when nothing needs them, by Unix seconds. Raises OSError."""
    if since != unneeded_since(models):
        file = models / UNNEEDED
        draft = file.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(since))
        draft.replace(file)


def unneeded_since(models: Path) -> dict[str, float]:
    """As written down last."""
    try:
        return msgspec.json.decode((models / UNNEEDED).read_bytes(), type=dict[str, float])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
