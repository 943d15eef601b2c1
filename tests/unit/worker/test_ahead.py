"""Zeros are looked for while a file grows: what is found is what would have been found afterwards."""

import errno
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.worker.test_zeros import long_runs, small, written
from worker.images import zeros
from worker.images.ahead import Ahead
from worker.images.holes import Extent
from worker.images.pages import PAGE, Run

__all__ = ["small"]


def some_pages(dice: random.Random) -> list[bool]:
    pages = list[bool]()
    while len(pages) < 1500:
        pages += [dice.random() < 0.5] * dice.choice((1, 2, 7, 8, 15, 16, 17, 31, 48, 100))
    return pages


def followed(directory: Path, content: bytes, dice: random.Random) -> Ahead:
    """A file of pages that grew to `content` while it was followed."""
    with Ahead(directory) as ahead:
        looking = ahead.begin()
        with (directory / "pages-1.img").open("wb", buffering=0) as file:
            at = 0
            while at < len(content):
                at += file.write(content[at : at + dice.randrange(1, 40) * PAGE])
                time.sleep(dice.choice((0, 0, 0.001)))
        reached = time.monotonic() + 60
        while ahead.seen("pages-1.img").until < len(content) - zeros.PIECE - zeros.PART and time.monotonic() < reached:
            time.sleep(0.01)
    looking.result(60)
    return ahead


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Extent]:
    """What is read from now on."""
    parts, really = list[Extent](), zeros.in_part

    def noted(descriptor: int, path: Path, part: Extent) -> Iterator[Extent]:
        parts.append(part)
        return really(descriptor, path, part)

    monkeypatch.setattr(zeros, "in_part", noted)
    return parts


@pytest.mark.parametrize("seed", range(6))
def test_what_was_seen_while_it_was_written_is_not_read_again_and_nothing_is_missed(
    tmp_path: Path, small: None, looked_at: list[Extent], seed: int
) -> None:
    dice = random.Random(seed)
    runs = written(tmp_path / "whole", pages := some_pages(dice), dice)
    ahead = followed(tmp_path, (tmp_path / "whole").read_bytes(), dice)
    seen = ahead.seen("pages-1.img")
    assert len(pages) * PAGE - zeros.PART - 2 * zeros.PIECE < seen.until <= len(pages) * PAGE - zeros.PART
    looked_at.clear()
    assert zeros.find(tmp_path / "pages-1.img", runs, 2, seen) == long_runs(pages)
    assert min(part.offset for part in looked_at) == seen.until


@pytest.mark.parametrize("seed", range(6))
def test_in_parts_of_the_file_the_same_is_found(tmp_path: Path, small: None, seed: int) -> None:
    dice = random.Random(100 + seed)
    written(tmp_path / "whole", pages := some_pages(dice), dice)
    seen = followed(tmp_path, (tmp_path / "whole").read_bytes(), dice).seen("pages-1.img")
    cuts = sorted(dice.sample(range(len(pages)), 60))
    runs = [Run((1 << 32) + at * PAGE, (end - at) * PAGE, at * PAGE) for at, end in zip(cuts[::2], cuts[1::2], strict=True)]
    assert zeros.find(tmp_path / "pages-1.img", runs, 2, seen) == zeros.find(tmp_path / "pages-1.img", runs, 2)


def test_of_another_file_nothing_is_known(tmp_path: Path) -> None:
    assert Ahead(tmp_path).seen("pages-7.img") == zeros.NOT_SEEN


def test_what_was_written_last_is_left_alone(tmp_path: Path, small: None) -> None:
    size = zeros.PART + zeros.PIECE - PAGE
    assert followed(tmp_path, bytes(size), random.Random(0)).seen("pages-1.img") == zeros.NOT_SEEN


def test_what_can_not_be_read_is_said(tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "pages-1.img").write_bytes(bytes(2 * (zeros.PART + zeros.PIECE)))
    monkeypatch.setattr(os, "preadv", broken)
    with Ahead(tmp_path) as ahead, pytest.raises(OSError, match="Input/output error"):
        ahead.begin().result(60)


def test_where_a_thread_can_not_make_way_it_looks_all_the_same(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "setpriority", forbidden)
    assert followed(tmp_path, bytes(4 * zeros.PART), random.Random(1)).seen("pages-1.img").until


def test_zeros_that_go_on_are_one_run(tmp_path: Path, small: None) -> None:
    size = 4 * zeros.PART
    seen = followed(tmp_path, bytes(size), random.Random(1)).seen("pages-1.img")
    assert seen.zeros == (Extent(0, seen.until),)
    assert zeros.find(tmp_path / "pages-1.img", [Run(0, size, 0)], 2, seen) == [Extent(0, size)]


@pytest.mark.parametrize("replaced", [True, False])
def test_nothing_is_known_of_a_file_that_is_not_what_was_seen(tmp_path: Path, small: None, replaced: bool) -> None:
    """CRIU does neither; if something does, the zeros of before must not be taken for those of now."""
    file, size = tmp_path / "pages-1.img", 4 * zeros.PART
    ahead = followed(tmp_path, bytes(size), random.Random(1))
    assert ahead.seen(file.name).until
    if replaced:
        (tmp_path / "other").write_bytes(os.urandom(size))
        (tmp_path / "other").rename(file)
    else:
        os.truncate(file, zeros.PIECE)
    assert ahead.seen(file.name) == zeros.NOT_SEEN
