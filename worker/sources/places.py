"""Where prepared sources live (`DIR/models/`), and how a directory appears there: whole, or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3

DRAFT: Final = ".draft-"
"""Prefix of what is being made. Whatever bears it at a start was left by a process that died."""


def models(data: Path) -> Path:
    """Return `DIR/models`, made if need be (0700)."""
    directory = data / "models"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def name_of(*parts: str) -> str:
    """Return a directory name that stands for `parts`: 24 hex digits, never a caller's text."""
    return blake3("\0".join(parts).encode()).hexdigest(length=12)


def fetched(source: str) -> str:
    """The directory of what was fetched of the hub's `hf:org/name@commit`."""
    return f"hf-{name_of(source)}"


def converted(marks: Iterable[str], dtype: str) -> str:
    """The directory of the weights of a source (`identity.identity`) as an engine can map them."""
    return f"converted-{name_of(*marks, dtype)}"


def pretended(name: str, weight_bytes: int) -> str:
    """The directory of a fake model."""
    return f"fake-{name_of(name, str(weight_bytes))}"


@contextlib.contextmanager
def made(target: Path) -> Iterator[Path]:
    """Give a fresh directory that becomes `target` when the block ends well, and is removed when it does not.

    Whoever makes the same one meanwhile (a thread whose step was given up goes on) has a directory of his own. The first to end
    well counts: it may be in use by the time that the second does.

    Raises:
        OSError: e.g. the disk is full.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{DRAFT}{target.name}-", dir=target.parent))
    try:
        yield draft
        for file in draft.iterdir():
            _sync(file)
        _sync(draft)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        _sync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def sweep(data: Path) -> list[str]:
    """Remove half-made directories, and return their names. Only at a start, before anything is made."""
    found = [path for path in models(data).rglob(f"{DRAFT}*") if path.is_dir()]
    for path in found:
        shutil.rmtree(path)
    return [path.name for path in found]


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
