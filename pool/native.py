"""The layout that an engine's own allocator gave its weights: which of its segments are nothing but weights, and where each
tensor lies. Pure.

Segments are matched by their order, never by address: two cold starts of a configuration allocate alike, at other addresses.
A segment that also holds scratch is private to each engine; the tensors in it travel in a host segment and are copied in.
"""

from collections.abc import Sequence

import msgspec

from pool.layout import PAGE, SMALL_ALIGN, native_digest
from pool.messages import Attached, Tensor

_PIECES_SHOWN = 3


class Span(msgspec.Struct, frozen=True):
    """Bytes of device memory."""

    address: int
    size: int

    @property
    def end(self) -> int:
        return self.address + self.size


class Named(msgspec.Struct, frozen=True):
    """A parameter or buffer of the engine's model."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: Span


class LayoutDiffers(Exception):
    """A set that does not fit this engine. The message names both layouts and the first place where they part."""


class Native(msgspec.Struct, frozen=True):
    shared: tuple[Span, ...]
    """Segments of weights alone, in order of allocation."""
    host_bytes: int
    """Size of the host segment behind them; 0: there is none."""
    tensors: tuple[Tensor, ...]
    """By name, without digests."""
    private: dict[str, Span]
    """Tensors of the host segment: where they lie in the engine's own memory."""

    @property
    def segments(self) -> tuple[int, ...]:
        return tuple([span.size for span in self.shared] + ([self.host_bytes] if self.host_bytes else []))

    @property
    def host_segments(self) -> int:
        return int(bool(self.host_bytes))

    def span_of(self, group: tuple[int, ...]) -> Span:
        """All of these segments, which lie side by side. Raises LayoutDiffers where they don't."""
        start = at = self.shared[group[0]].address
        for number in group:
            if self.shared[number].address != at:
                raise LayoutDiffers(f"segments {group[:_PIECES_SHOWN]}... don't lie side by side here: {number} is elsewhere")
            at += self.shared[number].size
        return Span(start, at - start)

    @property
    def digest(self) -> str:
        return native_digest(self.segments, self.host_segments, self.tensors)


def native(segments: Sequence[Span], blocks: Sequence[Span], tensors: Sequence[Named]) -> Native:
    """segments: the allocator's, in order. blocks: what is in use within them, as requested. tensors: all with bytes.

    A segment is shared if every block of it is covered by named tensors to its last byte.
    """
    pure = [_pure(segment, blocks, tensors) for segment in segments]
    shared = tuple(segment for segment, good in zip(segments, pure, strict=True) if good)
    placed: list[Tensor] = []
    private: dict[str, Span] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda one: one.name):
        number = next((at for at, span in enumerate(shared) if span.address <= tensor.at.address < span.end), None)
        if number is None:
            number, offset = len(shared), -(-end // SMALL_ALIGN) * SMALL_ALIGN
            end = offset + tensor.at.size
            private[tensor.name] = tensor.at
        else:
            offset = tensor.at.address - shared[number].address
        placed.append(
            Tensor(
                name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, segment=number, offset=offset,
                size_bytes=tensor.at.size,
            )
        )  # fmt: skip
    return Native(shared, -(-end // PAGE) * PAGE, tuple(placed), private)


def _pure(segment: Span, blocks: Sequence[Span], tensors: Sequence[Named]) -> bool:
    inside = [block for block in blocks if segment.address <= block.address < segment.end]
    spans = sorted((tensor.at for tensor in tensors), key=lambda span: span.address)
    return bool(inside) and all(_covered(block, spans) for block in inside)


def _covered(block: Span, spans: Sequence[Span]) -> bool:
    at = block.address
    for span in spans:
        if span.end <= at:
            continue
        if span.address > at:
            return False
        at = max(at, span.end)
        if at >= block.end:
            return True
    return False


def compare(own: Native, attached: Attached) -> None:
    """Before anything is mapped. Raises LayoutDiffers."""
    theirs = native_digest(attached.segments, attached.host_segments, attached.tensors)
    if theirs == own.digest:
        return
    what = _difference(own, attached)
    raise LayoutDiffers(
        f"{attached.weight_set} has layout {theirs[:16]}, this engine has {own.digest[:16]}: {what}; "
        "wake it in an engine of its own configuration, or stage its source in this one"
    )


def _difference(own: Native, attached: Attached) -> str:
    ours = {one.name: one for one in own.tensors}
    theirs = {one.name: one for one in attached.tensors}
    if missing := sorted(ours.keys() - theirs.keys()):
        return f"it lacks {len(missing)} tensors, such as {', '.join(missing[:_PIECES_SHOWN])}"
    if extra := sorted(theirs.keys() - ours.keys()):
        return f"it has {len(extra)} tensors more, such as {', '.join(extra[:_PIECES_SHOWN])}"
    for name, one in ours.items():
        other = msgspec.structs.replace(theirs[name], digest="")
        if other != one:
            return f"{name} is {_place(other)} there and {_place(one)} here"
    return f"segments are {attached.segments[:_PIECES_SHOWN]}... there and {own.segments[:_PIECES_SHOWN]}... here"


def _place(of: Tensor) -> str:
    return f"{of.dtype}{list(of.shape)} at {of.segment}+{of.offset}"
