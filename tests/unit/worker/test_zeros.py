"""Zeros of an image: which are found, that they leave the disk, and that they come back to memory all the same."""

import ctypes
import errno
import itertools
import mmap
import os
import random
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from blake3 import blake3

from tests.unit.worker.test_bulk import FILE_PRIVATE, PID, Dump, area, entry, stamp
from worker.filedigest import data_bytes, digest
from worker.images import bulk, holes, refill, zeros
from worker.images.holes import Extent, punch
from worker.images.pages import PAGE, Run

LEAST = zeros.LEAST_BYTES


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LEAST_BYTES", 1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is read at a time, so that much lies across a boundary."""
    monkeypatch.setattr(zeros, "PIECE", 3 * LEAST)
    monkeypatch.setattr(zeros, "PART", 6 * LEAST)


def written(path: Path, pages: list[bool], dice: random.Random) -> list[Run]:
    """A file with pages of zeros where `pages` says so; as a run of memory."""
    path.write_bytes(b"".join(bytes(PAGE) if nothing else dice.randbytes(PAGE) for nothing in pages))
    return [Run(1 << 32, PAGE * len(pages), 0)]


def long_runs(pages: list[bool]) -> list[Extent]:
    """What should be found, the slow way."""
    found, at = list[Extent](), 0
    for nothing, run in itertools.groupby(pages):
        size = PAGE * len(list(run))
        if nothing and size >= LEAST:
            found.append(Extent(at, size))
        at += size
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("threads", [1, 3])
def test_every_long_run_of_zero_pages_is_found_and_no_other(tmp_path: Path, small: None, seed: int, threads: int) -> None:
    dice, pages = random.Random(seed), list[bool]()
    while len(pages) < 700:
        pages += [dice.random() < 0.5] * dice.choice((1, 2, 7, 8, 15, 16, 17, 31, 48, 100))
    runs = written(tmp_path / "file", pages, dice)
    assert zeros.find(tmp_path / "file", runs, threads) == long_runs(pages)


@pytest.mark.parametrize("where", [0, 1, LEAST // 2, LEAST - 1])
def test_a_single_byte_makes_two_runs_of_one(tmp_path: Path, where: int) -> None:
    content = bytearray(2 * LEAST)
    content[LEAST // 2 + where] = 1
    (tmp_path / "file").write_bytes(content)
    page = (LEAST // 2 + where) // PAGE * PAGE
    sides = [Extent(0, page), Extent(page + PAGE, 2 * LEAST - page - PAGE)]
    found = zeros.find(tmp_path / "file", [Run(PAGE, 2 * LEAST, 0)], 2)
    assert found == [side for side in sides if side.size >= LEAST]


def test_nothing_is_looked_for_outside_of_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(8 * LEAST))
    runs = [Run(0x10000, LEAST, LEAST), Run(0x90000, LEAST, 2 * LEAST), Run(0, LEAST - PAGE, 5 * LEAST)]
    assert zeros.find(tmp_path / "file", runs, 2) == [Extent(LEAST, 2 * LEAST)]
    assert zeros.find(tmp_path / "file", [], 2) == []


def test_a_file_that_ends_too_early_is_no_zeros(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(LEAST))
    with pytest.raises(OSError, match=f"gave {LEAST} bytes of {2 * LEAST}") as failed:
        zeros.find(tmp_path / "file", [Run(0, 2 * LEAST, 0)], 2)
    assert failed.value.errno == errno.EIO


def test_memory_is_divided_where_zeros_begin_and_end() -> None:
    runs = [Run(0x100000, 4 * PAGE, 0), Run(0x200000, 4 * PAGE, 4 * PAGE), Run(0x300000, 2 * PAGE, 9 * PAGE)]
    data, nothing = zeros.apart(runs, [Extent(PAGE, PAGE), Extent(3 * PAGE, 3 * PAGE), Extent(9 * PAGE, 2 * PAGE)])
    assert data == [Run(0x100000, PAGE, 0), Run(0x102000, PAGE, 2 * PAGE), Run(0x202000, 2 * PAGE, 6 * PAGE)]
    assert nothing == [
        Run(0x101000, PAGE, PAGE), Run(0x103000, PAGE, 3 * PAGE), Run(0x200000, 2 * PAGE, 4 * PAGE),
        Run(0x300000, 2 * PAGE, 9 * PAGE),
    ]  # fmt: skip
    assert zeros.apart(runs, []) == (runs, [])


def lifted(directory: Path) -> tuple[Dump, bulk.Lifted]:
    """A dump with half a MiB of zeros in its bulk, and as many in what stays with CRIU."""
    areas = [area(0x1000000, 256, FILE_PRIVATE, flags=0x02), area(0x2000000, 512)]
    dump = Dump(directory, areas, [entry(0x1000000, 256), entry(0x2000000, 512)])
    content = bytearray(dump.bytes)
    for at in (64, 256 + 100):
        content[at * PAGE : (at + 128) * PAGE] = bytes(128 * PAGE)
    dump.bytes = bytes(content)
    (directory / "pages-5.img").write_bytes(content)
    return dump, bulk.lift(directory, PID, directory)


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_zeros_and_what_criu_has_leave_the_disk_and_the_file_reads_as_ever(tmp_path: Path) -> None:
    dump, made = lifted(tmp_path)
    store = tmp_path / f"bulk-{PID}.img"
    assert made.size == 512 * PAGE
    assert (made.kept, made.zeros) == ((Extent(0, 256 * PAGE),), (Extent((256 + 100) * PAGE, 128 * PAGE),))
    whole, before, known = blocks(store), digest(store), refill.stamp((tmp_path / f"bulk-{PID}.map").stat(), store.stat())
    assert store.read_bytes() == dump.bytes
    if not (gone := bulk.hollow(tmp_path, PID, made)):
        pytest.skip("this file system has no holes")
    assert gone == 128 * PAGE, "of zeros"
    assert data_bytes(store) == (512 - 128) * PAGE
    assert blocks(store) <= whole - (256 + 128) * PAGE
    content = store.read_bytes()
    assert content[256 * PAGE :] == dump.bytes[256 * PAGE :]
    assert digest(store) != before, "what CRIU has is gone from here"
    assert refill.stamp((tmp_path / f"bulk-{PID}.map").stat(), store.stat()) == known, "a restore may be under way"


def test_a_dump_without_bulk_has_nothing_to_be_hollowed(tmp_path: Path) -> None:
    assert bulk.hollow(tmp_path, PID, bulk.Lifted()) == 0


def test_where_the_file_system_has_no_holes_all_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump, made = lifted(tmp_path)

    class Refusing:
        def __init__(self, *_: object, **__: object) -> None:
            self.fallocate = self

        def __call__(self, *_: object) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(holes.ctypes, "CDLL", Refusing)  # type: ignore[attr-defined]
    told = list[dict[str, object]]()
    monkeypatch.setattr(holes, "log", SimpleNamespace(info=lambda event, **more: told.append({"event": event, **more})))
    assert bulk.hollow(tmp_path, PID, made) == 0
    assert (told[-1]["event"], told[-1]["reason"]) == ("no_holes", "Operation not supported")
    assert (told[-1]["made_bytes"], told[-1]["wanted_bytes"]) == (0, 128 * PAGE)
    assert (tmp_path / f"bulk-{PID}.img").read_bytes() == dump.bytes
    assert data_bytes(tmp_path / f"bulk-{PID}.img") == len(dump.bytes)


def test_memory_comes_back_to_the_byte_and_its_zeros_are_written_into_it(tmp_path: Path) -> None:
    """Zeros beside data, in pages with a single byte, across pieces; all of it over what was there, and present afterwards."""
    dice, size = random.Random(3), 24 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as room:
        base, wanted = ctypes.addressof(ctypes.c_char.from_buffer(room)), bytearray(size)
        stored, runs, at, gap = bytearray(), list[Run](), 0, set[int]()
        while at < size:
            many = min(dice.choice((1, 2, 15, 16, 17, 200, 700, 1500)) * PAGE, size - at)
            match dice.randrange(4):
                case 0 | 1:
                    part = bytes(many)
                case 2:
                    part = dice.randbytes(many)
                case _:
                    part = bytes(dice.randrange(PAGE)) + b"x"
                    part += bytes(many - len(part))
            if dice.random() < 0.9:
                runs.append(Run(base + at, many, len(stored)))
                wanted[at : at + many] = part
                stored += part
            else:
                gap |= set(range(at, at + many, PAGE))
            at += many
        store = tmp_path / f"bulk-{os.getpid()}.img"
        store.write_bytes(stored)
        found = zeros.find(store, runs, 2)
        assert sum(one.size for one in found) > size // 8
        (tmp_path / f"bulk-{os.getpid()}.map").write_bytes(bulk.table(*zeros.apart(runs, found)))
        before = digest(store)
        assert punch(store, found) in (0, sum(one.size for one in found))
        assert digest(store) == before == blake3(stored).hexdigest()
        for threads in (1, 4):
            room.madvise(mmap.MADV_DONTNEED)
            assert refill.refill(str(tmp_path), os.getpid(), threads, stamp(tmp_path)) == len(stored)
            assert not set(absent(base, size)) - gap, "its own pages, not to be made later by one thread"
            assert room[:] == wanted
        for page in gap:
            wanted[page : page + PAGE] = b"\xff" * PAGE
        room[:] = b"\xff" * size
        refill.refill(str(tmp_path), os.getpid(), 2, stamp(tmp_path))
        assert room[:] == wanted, "zeros over what was there"
        room[:] = b"\x01" * size  # pages of its own: writing to them is no more than that


def absent(base: int, size: int) -> list[int]:
    """Where in memory no page is, by /proc/self/pagemap."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(base // PAGE * 8)
        words = memoryview(file.read(size // PAGE * 8)).cast("Q")
    return [nth * PAGE for nth, word in enumerate(words) if not word >> 63]


def test_what_is_truncated_in_a_hole_or_beside_it_is_not_taken(tmp_path: Path) -> None:
    size = 4 * LEAST
    with mmap.mmap(-1, size) as room:
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        store, listed = (tmp_path / f"bulk-{os.getpid()}.{kind}" for kind in ("img", "map"))
        store.write_bytes(b"x" * LEAST + bytes(2 * LEAST) + b"y" * LEAST)
        runs = [Run(base, size, 0)]
        found = zeros.find(store, runs, 1)
        listed.write_bytes(bulk.table(*zeros.apart(runs, found)))
        punch(store, found)
        known, whole = stamp(tmp_path), digest(store)
        for end in (LEAST, 2 * LEAST, 3 * LEAST, size - 1):
            os.truncate(store, end)
            assert digest(store) != whole
            with pytest.raises(refill.RefillFailed, match="when the restore began"):
                refill.refill(str(tmp_path), os.getpid(), 2, known)
            with pytest.raises(refill.RefillFailed, match=r"gave \d+ bytes of"):
                refill.refill(str(tmp_path), os.getpid(), 2, stamp(tmp_path))


def test_a_byte_where_a_hole_should_be_makes_another_digest(tmp_path: Path) -> None:
    store = tmp_path / "file"
    store.write_bytes(b"x" * LEAST + bytes(64 * LEAST))
    whole = digest(store)
    punch(store, [Extent(LEAST, 64 * LEAST)])
    assert digest(store) == whole
    with store.open("r+b") as file:
        file.seek(30 * LEAST + 5)
        file.write(b"\1")
    assert digest(store) != whole
    with store.open("r+b") as file:
        file.seek(30 * LEAST + 5)
        file.write(b"\0")
    assert digest(store) == whole, "data of zeros is as good as a hole"


def test_no_hole_is_read_into_the_page_cache(tmp_path: Path) -> None:
    """It would keep the zeros, as much as the hole is long."""
    if (fincore := shutil.which("fincore")) is None:
        pytest.skip("no fincore here")
    store = tmp_path / "file"
    ends = os.urandom(LEAST), os.urandom(LEAST)
    with store.open("wb") as file:
        file.write(ends[0])
        file.seek(128 * LEAST, os.SEEK_CUR)
        file.write(ends[1])
    if data_bytes(store) > 2 * LEAST:
        pytest.skip("this file system has no holes")
    assert digest(store) == blake3(ends[0] + bytes(128 * LEAST) + ends[1]).hexdigest()
    cached = int(subprocess.run([fincore, "-bno", "RES", str(store)], capture_output=True, check=True).stdout)
    assert cached <= 2 * LEAST
