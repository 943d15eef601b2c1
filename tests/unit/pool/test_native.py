"""The layout that an engine's allocator made: what can be shared, what stays private, and which sets fit."""

import msgspec
import pytest

from pool.messages import Attached
from pool.native import LayoutDiffers, Named, Native, Span, compare, native

MIB = 1 << 20
FIRST, MIXED, SCRATCH = Span(16 * MIB, 4 * MIB), Span(64 * MIB, 2 * MIB), Span(80 * MIB, 2 * MIB)


def named(name: str, address: int, size: int) -> Named:
    return Named(name, "BF16", (size // 2,), Span(address, size))


TENSORS = [
    named("up", FIRST.address, 2 * MIB),
    named("down", FIRST.address + 2 * MIB, MIB),
    named("norm.b", MIXED.address, 512),
    named("norm.a", MIXED.address + 1024, 512),
    named("elsewhere", 4096, 64),
]
BLOCKS = [
    Span(FIRST.address, 2 * MIB),
    Span(FIRST.address + 2 * MIB, MIB),
    Span(MIXED.address, 512),
    Span(MIXED.address + 512, 512),  # nobody's name: scratch
    Span(MIXED.address + 1024, 512),
    Span(SCRATCH.address, MIB),
]


def made(moved: int = 0) -> Native:
    def at(span: Span) -> Span:
        return Span(span.address + moved, span.size)

    tensors = [Named(one.name, one.dtype, one.shape, at(one.at)) for one in TENSORS]
    return native([at(one) for one in (FIRST, MIXED, SCRATCH)], [at(one) for one in BLOCKS], tensors)


def attached(of: Native, **changed: object) -> Attached:
    fields = {"segments": of.segments, "tensors": of.tensors, "host_segments": of.host_segments, **changed}
    return Attached(weight_set="ws_1", **fields)  # type: ignore[arg-type]


def test_only_segments_of_named_tensors_alone_are_shared() -> None:
    layout = made()
    assert [span.size for span in layout.shared] == [4 * MIB]
    assert layout.segments == (4 * MIB, 4096)
    assert layout.host_segments == 1


def test_tensors_beside_scratch_are_packed_by_name_and_known_by_their_place() -> None:
    layout = made()
    packed = {one.name: one.offset for one in layout.tensors if one.segment == 1}
    assert packed == {"elsewhere": 0, "norm.a": 64, "norm.b": 576}
    assert layout.private["norm.a"] == Span(MIXED.address + 1024, 512)


def test_other_addresses_are_the_same_layout() -> None:
    assert made(moved=32 * MIB).digest == made().digest
    compare(made(moved=32 * MIB), attached(made()))


def test_a_block_that_is_covered_in_part_makes_its_segment_private() -> None:
    layout = native([FIRST], [Span(FIRST.address, 2 * MIB + 512)], TENSORS[:1])
    assert layout.shared == ()


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("up", "offset", 64, r"up is BF16\[1048576\] at 0\+64 there and BF16\[1048576\] at 0\+0 here"),
        ("up", "dtype", "F16", r"up is F16\[1048576\]"),
        ("down", "shape", (2, 2), r"down is BF16\[2, 2\]"),
        ("up", "name", "other", "lacks 1 tensors, such as up"),
    ],
)
def test_a_set_that_differs_is_refused_and_the_difference_named(name: str, field: str, value: object, words: str) -> None:
    own = made()
    tensors = tuple(msgspec.structs.replace(one, **{field: value}) if one.name == name else one for one in own.tensors)
    with pytest.raises(LayoutDiffers, match=words) as differs:
        compare(own, attached(own, tensors=tensors))
    assert own.digest[:16] in str(differs.value)


def test_more_tensors_than_ours_and_other_segments_are_refused() -> None:
    own = made()
    with pytest.raises(LayoutDiffers, match="1 tensors more, such as extra"):
        compare(own, attached(own, tensors=(*own.tensors, msgspec.structs.replace(own.tensors[0], name="extra"))))
    with pytest.raises(LayoutDiffers, match="segments are"):
        compare(own, attached(own, segments=(8 * MIB, 4096)))


def test_a_daemon_that_says_nothing_of_blocks_has_made_one_a_segment() -> None:
    of_before = Attached(weight_set="ws_1", segments=(MIB, MIB, MIB), tensors=(), host_segments=1, device="GPU-a")
    assert (of_before.covered, of_before.descriptors) == (((0,), (1,)), 3)
    in_blocks = msgspec.structs.replace(of_before, blocks=((1, 0),))
    assert (in_blocks.covered, in_blocks.descriptors) == (((1, 0),), 2)
    on_host = msgspec.structs.replace(of_before, device=None, host_segments=0)
    assert on_host.descriptors == 3
    assert msgspec.structs.replace(of_before, in_place=True).descriptors == 1
