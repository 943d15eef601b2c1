"""Which memory to have ready, and what becomes of it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pool.arena import Arena
from pool.layout import gaps
from pool.nodes import Nodes
from pool.slabs import Slab
from pool.spares import Make, Shed, Spare, least_wanted, matched, next_step


@pytest.mark.parametrize(
    ("have", "wanted", "allowed", "step"),
    [
        ((), (), 100, None),
        ((), (4, 2), 100, Make(4)),
        ((4,), (4, 2), 100, Make(2)),
        ((4, 2), (4, 2), 100, None),
        ((4,), (4, 4), 100, Make(4)),
        ((), (40, 2), 10, Make(2)),
        ((2,), (40, 2), 10, None),
        ((9,), (4,), 10, Shed(9)),
        ((9,), (4,), 100, Make(4)),
        ((9,), (), 10, None),
        ((4, 2), (4, 2), 5, Shed(4)),
        ((9, 4), (4,), 8, Shed(9)),
        ((), (4,), 0, None),
    ],
    ids=[
        "nothing is asked for", "the first first", "then the next", "all there", "two of a size", "what fits", "no more fits",
        "in the place of what nobody wants", "beside it where there is room", "what is there stays", "too much: the largest",
        "too much: what nobody wants", "nothing is allowed",
    ],
)  # fmt: skip
def test_steps(have: tuple[int, ...], wanted: tuple[int, ...], allowed: int, step: Make | Shed | None) -> None:
    assert next_step(have, wanted, allowed) == step


def test_steps_come_to_an_end_whatever_is_wanted() -> None:
    have: list[int] = [7, 7, 3]
    for _ in range(100):
        match next_step(have, (5, 5, 3, 2, 2), 14):
            case Make(size):
                have.append(size)
            case Shed(size):
                have.remove(size)
            case None:
                break
    assert sorted(have) == [3, 5, 5]


def spare(size: int, *, slab: bool = False) -> Spare:
    return Spare(Path(), -1, size, dirty=False, slab=Slab(0, size) if slab else None)


def test_equal_sizes_are_found_first_whatever_their_order() -> None:
    four, six = spare(4), spare(6)
    assert matched([four, six], (5, 6, 4)) == {1: six, 2: four}


def test_near_sizes_do_and_far_ones_do_not() -> None:
    ten = spare(10)
    assert matched([ten], (6,)) == {0: ten}
    assert matched([ten], (19,)) == {0: ten}
    assert matched([ten], (4,)) == {}
    assert matched([ten], (21,)) == {}


def test_what_is_pinned_keeps_its_size() -> None:
    assert matched([spare(10, slab=True)], (9,)) == {}


def test_gaps_are_what_no_tensor_covers() -> None:
    found = gaps((100, 50, 10), [(0, 64, 10), (0, 0, 20), (0, 10, 15), (1, 0, 50)])
    assert found == {0: [(25, 39), (74, 26)], 1: [], 2: [(0, 10)]}


@contextmanager
def dirty(path: Path, size: int) -> Iterator[Spare]:
    path.write_bytes(b"\xff" * size)
    yield Spare(path, os.open(path, os.O_RDWR), size, dirty=True)


@pytest.mark.parametrize("size", [3000, 5000])
def test_memory_that_held_a_set_comes_zeroed_where_no_tensor_is(tmp_path: Path, size: int) -> None:
    draft = Arena(tmp_path).begin((4096,), gaps((4096,), [(0, 100, 50)]))
    with dirty(tmp_path / "spare", size) as found:
        draft.use({0: found})
        assert draft.missing_bytes == 0
        draft.allocate(0)
    os.pwrite(draft.fds[0], b"w" * 50, 100)
    assert os.pread(draft.fds[0], 5000, 0) == bytes(100) + b"w" * 50 + bytes(3946)
    draft.discard()


def test_memory_that_can_not_grow_is_the_drafts_to_give_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        os.ftruncate(fd, offset + size)
        raise OSError(errno.ENOSPC, "no more")

    monkeypatch.setattr("pool.spares.allocate", full)
    draft = Arena(tmp_path).begin((8192,), {})
    with dirty(tmp_path / "spare", 4096) as found:
        draft.use({0: found})
        with pytest.raises(OSError, match="no more"):
            draft.allocate(0)
        assert draft.fds == [found.fd], "else nobody would close it, and its memory would be gone for good"
        assert (found.path.parent, found.size, os.fstat(found.fd).st_size) == (draft.path, 4096, 4096)
    draft.discard()


def test_memory_that_can_not_be_renamed_is_as_long_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lengthened(nodes: Nodes, fd: int, size: int, node: int | None) -> None:
        os.ftruncate(fd, size)  # as what says where a segment lies does

    monkeypatch.setattr(Nodes, "prefer", lengthened)
    draft = Arena(tmp_path).begin((8192,), {})
    with dirty(tmp_path / "spare", 4096) as found:
        draft.use({0: found}, (1,))
        found.path.unlink()
        with pytest.raises(FileNotFoundError):
            draft.allocate(0)
        assert (found.size, os.fstat(found.fd).st_size) == (4096, 4096)
    draft.discard()


def test_of_a_size_that_is_too_much_goes_what_lies_where_fewer_are_wanted() -> None:
    near, far, other = spare(4), spare(4), spare(9)
    near.node, far.node, other.node = 0, 1, 1
    assert least_wanted([near, other, far], 4, (4, 9), (0, 1)) is far
    assert least_wanted([near, other, far], 4, (4, 9), (1, 1)) is near
    assert least_wanted([near, other, far], 4, (), ()) is near
