"""A layout: every tensor within one segment, aligned, disjoint, and the same whoever makes it in whatever order."""

from hypothesis import given
from hypothesis import strategies as st

from pool.layout import LARGE_ALIGN, LARGE_BYTES, PAGE, SMALL_ALIGN, lay_out, weight_set_id
from pool.safetensors import Entry

SEGMENT = 64 << 20
sizes = st.one_of(st.integers(0, 5000), st.integers(0, 3 * SEGMENT), st.sampled_from([LARGE_BYTES - 1, LARGE_BYTES, SEGMENT]))


def entry(name: str, size: int, file: int = 0, offset: int = 0) -> Entry:
    return Entry(name=name, dtype="U8", shape=(size,), file=file, offset=offset, size_bytes=size)


entries = st.dictionaries(st.text(max_size=6), sizes, min_size=1, max_size=25).map(
    lambda drawn: [entry(name, size) for name, size in drawn.items()]
)


@given(entries)
def test_tensors_are_inside_aligned_and_disjoint(drawn: list[Entry]) -> None:
    layout = lay_out(drawn, segment_bytes=SEGMENT)
    assert [placed.entry.name for placed in layout.tensors] == sorted(entry.name for entry in drawn)
    ends = dict.fromkeys(range(len(layout.segments)), 0)
    for placed in layout.tensors:
        assert placed.offset >= ends[placed.segment]
        assert placed.offset % (LARGE_ALIGN if placed.entry.size_bytes >= LARGE_BYTES else SMALL_ALIGN) == 0
        ends[placed.segment] = placed.offset + placed.entry.size_bytes
        assert ends[placed.segment] <= layout.segments[placed.segment]
    assert all(size % LARGE_ALIGN == 0 for size in layout.segments[:-1])
    assert all(size > 0 and size % PAGE == 0 for size in layout.segments)


@given(entries)
def test_segments_are_bounded_and_little_is_wasted(drawn: list[Entry]) -> None:
    layout = lay_out(drawn, segment_bytes=SEGMENT)
    largest = max(entry.size_bytes for entry in drawn)
    assert all(size <= max(SEGMENT, largest + LARGE_ALIGN) for size in layout.segments)
    for before, after in zip(layout.segments, layout.segments[1:], strict=False):
        assert before + after > SEGMENT - LARGE_ALIGN  # else one segment would have done


@given(entries, st.randoms())
def test_order_and_origin_do_not_matter(drawn: list[Entry], random: object) -> None:
    elsewhere = [entry(of.name, of.size_bytes, file=3, offset=77) for of in drawn]
    random.shuffle(elsewhere)  # type: ignore[attr-defined]
    assert lay_out(elsewhere).digest == lay_out(drawn).digest


@given(entries, st.integers(0, 24))
def test_every_difference_that_an_engine_sees_shows_in_the_digest(drawn: list[Entry], which: int) -> None:
    changed = list(drawn)
    of = changed[which % len(changed)]
    changed[which % len(changed)] = Entry(
        name=of.name, dtype="I8", shape=of.shape, file=of.file, offset=of.offset, size_bytes=of.size_bytes
    )
    assert lay_out(changed).digest != lay_out(drawn).digest


def test_an_id_tells_bytes_and_layouts_apart() -> None:
    ids = {weight_set_id("l1", ["a", "b"]), weight_set_id("l1", ["b", "a"]), weight_set_id("l2", ["a", "b"])}
    assert len(ids) == 3
    assert all(len(of) == 35 and of.startswith("ws_") for of in ids)
