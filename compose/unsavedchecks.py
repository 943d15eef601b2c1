"""Which engines of a plane that runs here are not on disk, where they were to go, and why."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from compose.check import Check
from compose.client import elsewhere
from compose.pinchecks import told

_CURE: Final = (
    "Where there is no room: make some, or give images more of the disk ([images] quota), and they go there by themselves. "
    "What another version has started: `enginehouse stop` its model, and load it again."
)


def unsaved_check(data: Path, *, running: bool) -> Iterator[Check]:
    """Nothing where all are where they should be, or no plane runs."""
    if running and elsewhere() is None and (unsaved := told(data, "unsaved")):
        yield Check(name="unsaved", verdict="note", found="; ".join(unsaved), cure=_CURE)
