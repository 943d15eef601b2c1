"""Copies of models that draft for others: `DIR/models/drafts-<digest>`, and which configuration reads which.

A configuration's id says nothing of the copy that is part of it, so that is written down before any engine is started:
`DIR/models/drafting/<configuration>` holds the copy's name.
"""

import contextlib
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from worker.sources.places import DRAFT

PREFIX: Final = "drafts-"
_NOTES: Final = "drafting"


def note(models: Path, configuration: str, copy: Path) -> None:
    """Write down that engines of `configuration` read `copy`. Raises OSError."""
    notes = models / _NOTES
    notes.mkdir(mode=0o700, exist_ok=True)
    draft = notes / f".{configuration}.new"
    draft.write_text(copy.name, encoding="ascii")
    draft.replace(notes / configuration)


def unneeded(
    copies: Collection[str],
    noted: Mapping[str, str],
    used: Collection[str],
    held: Collection[str],
    drafted: Collection[str] = (),
) -> list[str]:
    """The copies that may go, in order of name.

    `noted`: configuration -> copy. `used`: the configurations of all models that are not retired, and of all instances here.
    `held`: copies that models have been given since. `drafted`: of those in use, the ones whose models name one that drafts.

    A copy that nothing is noted of was made for a model that was then refused, or its maker died: no engine was ever told its
    name. Unless one that is drafted for has no note: it is of a worker before notes were made, and may read any of these.
    """
    needed = {noted[configuration] for configuration in used if configuration in noted} | set(held)
    if not all(configuration in noted for configuration in drafted):
        needed |= set(copies) - set(noted.values())
    return sorted(set(copies) - needed)


def remove(models: Path, used: Collection[str], held: Collection[str], drafted: Collection[str] = ()) -> list[str]:
    """Remove what is unneeded, notes included; the copies' names. Nothing may be prepared meanwhile. Raises OSError."""
    if not (copies := [path.name for path in models.glob(f"{PREFIX}*")]):
        return []
    noted = {}
    for path in (models / _NOTES).glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):
            noted[path.name] = path.read_text(encoding="ascii")
    gone = unneeded(copies, noted, used, held, drafted)
    for copy in gone:
        for configuration in (name for name, its in noted.items() if its == copy):
            (models / _NOTES / configuration).unlink(missing_ok=True)
        leaving = models / f"{DRAFT}{copy}-leaves"  # half removed it is no copy any more; a start sweeps it up
        shutil.rmtree(leaving, ignore_errors=True)
        (models / copy).rename(leaving)
        shutil.rmtree(leaving)
    return gone
