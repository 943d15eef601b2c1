"""Whether the settings file of a plane that runs is applied as it is now: by what its `up` has left word of."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from compose.check import Check
from controlplane.plane import Plane


def unapplied(data: Path) -> str:
    """Why the file is not applied, with its line where that is known; empty: it is, or there is none."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return Plane.read(data).settings_unapplied.read_text()
    return ""


def settings_check(data: Path, *, running: bool) -> Iterator[Check]:
    """Nothing while all is well, or nothing runs: the next `up` says it of itself."""
    if running and (why := unapplied(data)):
        cure = "Mend the file: it is applied as soon as it is written. Until then the plane keeps to what it had before."
        yield Check(name="settings", verdict="bad", found=f"not applied: {why}", cure=cure)
