"""What the ranks of a gang call their weights, and how each answers for itself."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pool.messages import Staged

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
    graphs: int = 0
    """CUDA graphs that it has captured."""


class Answer(msgspec.Struct, frozen=True):
    found: Any
    fault: tuple[str, str, str] | None
    """Kind of error, its code, its message."""
    word: Word | None


def form_of(form: str, rank: int, size: int) -> str:
    """The form in which one rank of a gang keeps a source's files."""
    return f"{form}.{rank}of{size}"


def joined(parts: Sequence[Staged]) -> Staged:
    """The sets of all ranks as one, under their joint name."""
    return Staged(
        weight_set=JOINT.join(part.weight_set for part in parts), size_bytes=sum(part.size_bytes for part in parts),
        took_ms=max(part.took_ms for part in parts), read_bytes=sum(part.read_bytes for part in parts),
    )  # fmt: skip


def split(staged: Staged) -> list[Staged]:
    """The other way round; what was read and how large each is are told evenly."""
    names = staged.weight_set.split(JOINT)
    size, read = staged.size_bytes // len(names), staged.read_bytes // len(names)
    return [replace(staged, weight_set=name, size_bytes=size, read_bytes=read) for name in names]
