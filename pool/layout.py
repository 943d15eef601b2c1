"""Where each tensor of a weight set lies. Pure: the same tensors give the same layout anywhere."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from blake3 import blake3

from pool.messages import Tensor
from pool.safetensors import Entry

SEGMENT_BYTES = 256 << 20
"""A segment is a file and a descriptor: few enough for one message at 14 GiB, small enough to be made ahead of need."""
SMALL_ALIGN = 64
"""A cache line, and what vector loads want."""
LARGE_ALIGN = 2 << 20
"""A huge page."""
LARGE_BYTES = 32 << 20
"""From here on a tensor is aligned to a huge page: the gap is at most a sixteenth of it."""
PAGE = 4096
_VERSION = 1


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    entry: Entry
    segment: int
    offset: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    segments: tuple[int, ...]
    """Bytes of each. All but the last are multiples of 2 MiB: alignment holds when they are mapped one after the other."""
    tensors: tuple[Placed, ...]
    """By name."""
    digest: str

    @property
    def size_bytes(self) -> int:
        return sum(self.segments)


def lay_out(entries: Iterable[Entry], *, segment_bytes: int = SEGMENT_BYTES) -> Layout:
    """A tensor never spans segments: one larger than `segment_bytes` has a segment of its own."""
    ends: list[int] = []
    placed: list[Placed] = []
    for entry in sorted(entries, key=lambda entry: entry.name):
        align = LARGE_ALIGN if entry.size_bytes >= LARGE_BYTES else SMALL_ALIGN
        start = _up(ends[-1], align) if ends else 0
        if not ends or (start + entry.size_bytes > segment_bytes and ends[-1]):
            ends.append(0)
            start = 0
        ends[-1] = start + entry.size_bytes
        placed.append(Placed(entry=entry, segment=len(ends) - 1, offset=start))
    segments = tuple([_up(end, LARGE_ALIGN) for end in ends[:-1]] + [max(_up(end, PAGE), PAGE) for end in ends[-1:]])
    return Layout(segments=segments, tensors=tuple(placed), digest=_digest(segments, placed))


Gaps = Mapping[int, Sequence[tuple[int, int]]]
"""Segment -> (offset, size) of what no tensor covers."""


def gaps(segments: Sequence[int], covered: Iterable[tuple[int, int, int]]) -> Gaps:
    """covered: (segment, offset, size) of each tensor; they may overlap."""
    found: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(segments))}
    ends = [0] * len(segments)
    for number, offset, size in sorted(covered):
        if offset > ends[number]:
            found[number].append((ends[number], offset - ends[number]))
        ends[number] = max(ends[number], offset + size)
    for number, size in enumerate(segments):
        if ends[number] < size:
            found[number].append((ends[number], size - ends[number]))
    return found


def _up(size: int, align: int) -> int:
    return -(-size // align) * align


def _digest(segments: Sequence[int], placed: Sequence[Placed]) -> str:
    """Over all that an engine relies on, and not over where the bytes came from."""
    lines = [(of.entry.name, of.entry.dtype, of.entry.shape, of.segment, of.offset, of.entry.size_bytes) for of in placed]
    return blake3(msgspec.msgpack.encode((_VERSION, segments, lines))).hexdigest()


def native_digest(segments: Sequence[int], host_segments: int, tensors: Sequence[Tensor]) -> str:
    """Of a layout that an engine has made itself."""
    lines = [(of.name, of.dtype, of.shape, of.segment, of.offset, of.size_bytes) for of in tensors]
    return blake3(msgspec.msgpack.encode((_VERSION, segments, host_segments, lines))).hexdigest()


def weight_set_id(layout_digest: str, tensor_digests: Sequence[str]) -> str:
    """tensor_digests: hex, in the layout's order."""
    return "ws_" + blake3(msgspec.msgpack.encode((layout_digest, tensor_digests))).hexdigest()[:32]
