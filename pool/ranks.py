"""What the ranks of a gang call their weights, and how each answers for itself."""

from typing import Any, Final

import msgspec

JOINT: Final = "+"
"""Between the names of the ranks' weight sets, in order of rank: the name of a gang's."""


class Word(msgspec.Struct, frozen=True):
    """Where a rank is."""

    pid: int
    own: bool
    attached: str | None
    shared_bytes: int
    bytes_mapped: int
    bytes_kv: int


class Answer(msgspec.Struct, frozen=True):
    found: Any
    fault: tuple[str, str, str] | None
    """Kind of error, its code, its message."""
    word: Word | None


def form_of(form: str, rank: int, size: int) -> str:
    """The form in which one rank of a gang keeps a source's files."""
    return f"{form}.{rank}of{size}"
