"""CRIU's lists of pages: where in memory they were, and where their bytes are."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from msgspec import Struct

from worker.images import records
from worker.images.records import RecordsUnknown

PAGE: Final = 4096
_LAZY, _PRESENT = 1 << 1, 1 << 2
"""CRIU's bits of a list: of pages that may come later, and of pages whose bytes are here."""
_AT_ONCE: Final = 8 << 20
"""Bytes in memory while pages are copied: an area may have as much as half of it."""


class Run(Struct, frozen=True):
    """Bytes that follow one another, in memory and in a file; whole pages."""

    start: int
    size: int
    offset: int


class Pages(Struct, frozen=True):
    """A list of pages and where their bytes are."""

    path: Path
    head: bytes
    first: bytes
    runs: list[Run]
    bytes_in: Path

    @staticmethod
    def read(path: Path) -> "Pages":
        """Raises OSError, RecordsUnknown, KeyError, ValueError."""
        head, (first, *entries) = records.read(path)
        pages = Pages(path, head, first, list(_runs(entries)), path.parent / f"pages-{records.numbers(first)[1]}.img")
        if (there := pages.bytes_in.stat().st_size) != pages.size:
            raise RecordsUnknown(f"{pages.bytes_in.name} has {there} bytes, and {path.name} names {pages.size}")
        return pages

    @property
    def size(self) -> int:
        """Bytes of all pages."""
        return sum(run.size for run in self.runs)

    def keep(self, kept: list[Run], source: Path) -> None:
        """Leave CRIU these alone, their bytes taken from `source`. Raises OSError.

        Both files become new ones; other names of the old ones keep what was written.
        """
        left, listed = self.bytes_in.with_suffix(".new"), self.path.with_suffix(".new")
        with source.open("rb") as given, left.open("wb") as taken:
            for run in kept:
                copied(given, run.offset, run.size, taken)
        records.write(listed, self.head, [self.first, *map(_entry, kept)])
        left.rename(self.bytes_in)
        listed.rename(self.path)


def copied(source: BinaryIO, offset: int, size: int, target: BinaryIO) -> None:
    """Raises OSError; also where the source ends too early: all pages after that would come to wrong places."""
    source.seek(offset)
    while size:
        part = source.read(min(size, _AT_ONCE))
        if not part:
            raise OSError(errno.EIO, f"{size} bytes are missing", source.name)
        target.write(part)
        size -= len(part)


def _runs(entries: list[bytes]) -> Iterator[Run]:
    offset = 0
    for entry in entries:
        known = records.numbers(entry)
        if known.get(3) or known.get(4, _PRESENT) & ~_LAZY != _PRESENT:
            raise RecordsUnknown(f"the pages at {known[1]:#x} are not in this image")
        size = known.get(5, known[2]) * PAGE
        yield Run(known[1], size, offset)
        offset += size


def _entry(run: Run) -> bytes:
    pages = run.size // PAGE
    return records.message([(1, run.start), (2, pages), (4, _PRESENT), (5, pages)])
