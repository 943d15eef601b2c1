"""The bulk of an image's memory: what is taken out of CRIU's lists, and that it comes back to its place."""

import ctypes
import mmap
import os
import random
import struct
from pathlib import Path

import pytest

from worker.images import bulk, criu, pages, records, refill
from worker.images.pages import PAGE, Run
from worker.images.records import RecordsUnknown

HEAD = struct.pack("<II", 0x54564319, 0x56084025)
REGULAR_PRIVATE, HEAP, FILE_PRIVATE, STACK = 0x201, 0x221, 0x41, 0x203
PID = 1001


def within(number: int, body: bytes) -> bytes:
    """A message as a field of another, of less than 128 bytes."""
    return (
        records.message([(number, 0)])[:-1].replace(bytes([number << 3]), bytes([number << 3 | 2])) + bytes([len(body)]) + body
    )


def area(start: int, pages: int, status: int = REGULAR_PRIVATE, flags: int = 0x22, prot: int = 3) -> bytes:
    body = records.message([(1, start), (2, start + pages * PAGE), (3, 0), (4, 7), (5, prot), (6, flags), (7, status), (8, 1)])
    return within(14, body)


def entry(start: int, pages: int, flags: int = 4) -> bytes:
    return records.message([(1, start), (2, pages), (4, flags), (5, pages)])


class Dump:
    """What CRIU leaves of a process, as far as it matters."""

    def __init__(self, directory: Path, areas: list[bytes], entries: list[bytes], rseq: int = 0) -> None:
        self.directory = directory
        records.write(directory / f"mm-{PID}.img", HEAD, [records.message([(1, 1), (12, 3)]) + b"".join(areas)])
        records.write(directory / f"pagemap-{PID}.img", HEAD, [records.message([(1, 5)]), *entries])
        body = records.message([(1, rseq), (2, 32), (3, 9)])
        thread = within(15, body)
        records.write(directory / f"core-{PID}.img", HEAD, [records.message([(1, 1)]) + within(5, thread) * bool(rseq)])
        records.write(directory / "files.img", HEAD, [])
        count = sum(records.numbers(one)[5] for one in entries)
        self.bytes = random.Random(1).randbytes(count * PAGE)
        (directory / "pages-5.img").write_bytes(self.bytes)

    def listed(self) -> list[tuple[int, int]]:
        _, (_, *entries) = records.read(self.directory / f"pagemap-{PID}.img")
        return [(one[1], one[5]) for one in map(records.numbers, entries)]


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LEAST_BYTES", 1)


def test_records_are_what_was_written_and_numbers_of_any_size_come_back(tmp_path: Path) -> None:
    values = [(1, 0), (2, 127), (3, 128), (14, 1 << 47), (15, (1 << 64) - 1)]
    records.write(tmp_path / "a", HEAD, [records.message(values), b""])
    head, (first, empty) = records.read(tmp_path / "a")
    assert (head, empty) == (HEAD, b"")
    assert records.numbers(first) == dict(values)


@pytest.mark.parametrize("broken", [b"", b"12345678", HEAD + b"\x09\0\0\0ab", HEAD + b"\x01"])
def test_a_file_that_is_not_criu_s_is_known_as_such(tmp_path: Path, broken: bytes) -> None:
    (tmp_path / "a").write_bytes(broken)
    with pytest.raises(RecordsUnknown):
        records.read(tmp_path / "a")


@pytest.mark.parametrize("record", [b"\x08", b"\x08\xff", b"\x0a\x05ab", b"\x0d\1", b"\x0b"])
def test_a_record_that_ends_too_early_is_known_as_such(record: bytes) -> None:
    with pytest.raises(RecordsUnknown):
        records.numbers(record)


def test_fields_of_fixed_size_are_passed_over() -> None:
    assert records.numbers(b"\x09" + bytes(8) + b"\x15" + bytes(4) + b"\x18\x07") == {1: 0, 2: 0, 3: 7}


def test_plain_memory_is_lifted_and_all_else_stays_with_criu(tmp_path: Path) -> None:
    areas = [
        area(0x10000, 4, FILE_PRIVATE, flags=0x02),
        area(0x20000, 8),
        area(0x30000, 4, HEAP),
        area(0x40000, 4, prot=1),
        area(0x50000, 4, flags=0x2022),  # locked
        area(0x60000, 4, flags=0x4022),  # an arena
        area(0x70000, 4, STACK, flags=0x122),
    ]
    entries = [
        entry(0x11000, 1),
        entry(0x20000, 3),
        entry(0x24000, 1, 6),
        *(entry(at, 2) for at in range(0x30000, 0x80000, 0x10000)),
    ]
    dump = Dump(tmp_path, areas, entries)
    assert bulk.lift(tmp_path, PID, tmp_path).size == 8 * PAGE
    assert dump.listed() == [(0x11000, 1), (0x40000, 2), (0x50000, 2), (0x70000, 2)]
    parts = [dump.bytes[at * PAGE : (at + many) * PAGE] for at, many in ((0, 1), (7, 2), (9, 2), (13, 2))]
    assert (tmp_path / "pages-5.img").read_bytes() == b"".join(parts)
    assert (tmp_path / f"bulk-{PID}.img").stat().st_size == len(dump.bytes)


def test_a_page_that_the_kernel_writes_for_a_thread_stays_with_criu(tmp_path: Path) -> None:
    dump = Dump(tmp_path, [area(0x10000, 1, FILE_PRIVATE), area(0x20000, 8)], [entry(0x10000, 1), entry(0x20000, 8)], 0x22FF0)
    listed = tmp_path / f"pagemap-{PID}.img"
    before = listed.read_bytes()
    os.link(listed, tmp_path / "other name")
    assert bulk.lift(tmp_path, PID, tmp_path).size == 6 * PAGE
    assert dump.listed() == [(0x10000, 1), (0x22000, 1), (0x23000, 1)]
    assert (tmp_path / "other name").read_bytes() == before, "the files are new ones"


def test_memory_that_others_could_share_is_lifted_where_it_is_seen(tmp_path: Path) -> None:
    areas = [area(0x10000, 1, FILE_PRIVATE), area(0x20000, 8)]
    areas += [area(at, 4, 0x4081, flags=0x1) for at in (0x40000, 0x50000)]
    areas.append(area(0x60000, 4, 0x4081, flags=0x1, prot=1))
    dump = Dump(tmp_path, areas, [entry(0x10000, 1), entry(0x20000, 8)])
    file = records.message([(1, 18), (2, 7)]) + within(20, records.message([(1, 7), (5, 3)]))
    records.write(tmp_path / "files.img", HEAD, [records.message([(1, 1), (2, 6)]), file])
    records.write(tmp_path / "memfd.img", HEAD, [records.message([(4, 4 * PAGE), (5, 99), (6, 1), (7, 3)])])
    records.write(tmp_path / "pagemap-shmem-99.img", HEAD, [records.message([(1, 9)]), entry(0, 2), entry(3 * PAGE, 1)])
    (tmp_path / "pages-9.img").write_bytes(dump.bytes[: 3 * PAGE])
    assert bulk.lift(tmp_path, PID, tmp_path).size == (8 + 3) * PAGE
    assert (tmp_path / f"bulk-{PID}.img").read_bytes()[-3 * PAGE :] == dump.bytes[: 3 * PAGE]
    assert (tmp_path / "pages-9.img").read_bytes() == dump.bytes[:PAGE], "CRIU is left one page"
    _, (_, *left) = records.read(tmp_path / "pagemap-shmem-99.img")
    assert left == [entry(0, 1)]
    table = refill.Table(str(tmp_path / f"bulk-{PID}.map"))
    assert table.whole == (8 + 3) * PAGE


@pytest.mark.parametrize(("seals", "at"), [(8, 0), (1, PAGE)])
def test_a_shared_area_that_is_sealed_or_not_seen_whole_stays_with_criu(tmp_path: Path, seals: int, at: int) -> None:
    Dump(tmp_path, [area(0x10000, 1, FILE_PRIVATE), area(0x20000, 8), area(0x40000, 4, 0x4081, flags=0x1)],
         [entry(0x10000, 1), entry(0x20000, 8)])  # fmt: skip
    file = records.message([(1, 18), (2, 7)]) + within(20, records.message([(1, 7), (5, 3)]))
    records.write(tmp_path / "files.img", HEAD, [file])
    records.write(tmp_path / "memfd.img", HEAD, [records.message([(4, 4 * PAGE), (5, 99), (6, seals), (7, 3)])])
    records.write(tmp_path / "pagemap-shmem-99.img", HEAD, [records.message([(1, 9)]), entry(at, 4)])
    (tmp_path / "pages-9.img").write_bytes(bytes(4 * PAGE))
    assert bulk.lift(tmp_path, PID, tmp_path).size == 8 * PAGE
    assert (tmp_path / "pages-9.img").stat().st_size == 4 * PAGE


def test_what_is_not_understood_is_left_as_it_was(tmp_path: Path) -> None:
    for entries in ([entry(0x20000, 8, 5)], [entry(0x20000, 8), b"\x0b"]):
        Dump(tmp_path, [area(0x20000, 8)], [entry(0x20000, 8)])
        records.write(tmp_path / f"pagemap-{PID}.img", HEAD, [records.message([(1, 5)]), *entries])
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert bulk.lift(tmp_path, PID, tmp_path).size == 0
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        assert not criu.refill_script(tmp_path, PID, tmp_path / "script", tmp_path / "mark")


@pytest.mark.parametrize("number", [5, 9])
def test_a_dump_with_less_or_more_bytes_than_its_list_names_is_left_as_it_was(tmp_path: Path, number: int) -> None:
    """A page less, and every page after it would come to a wrong place. Nothing is touched before all of it is known."""
    Dump(tmp_path, [area(0x10000, 1, FILE_PRIVATE), area(0x20000, 8), area(0x40000, 4, 0x4081, flags=0x1)],
         [entry(0x10000, 1), entry(0x20000, 8)])  # fmt: skip
    file = records.message([(1, 18), (2, 7)]) + within(20, records.message([(1, 7), (5, 3)]))
    records.write(tmp_path / "files.img", HEAD, [file])
    records.write(tmp_path / "memfd.img", HEAD, [records.message([(4, 4 * PAGE), (5, 99), (6, 1), (7, 3)])])
    records.write(tmp_path / "pagemap-shmem-99.img", HEAD, [records.message([(1, 9)]), entry(0, 4)])
    (tmp_path / "pages-9.img").write_bytes(bytes(4 * PAGE))
    bytes_in = tmp_path / f"pages-{number}.img"
    whole = bytes_in.stat().st_size
    for size in (whole - PAGE, whole + PAGE):
        os.truncate(bytes_in, size)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert bulk.lift(tmp_path, PID, tmp_path).size == 0
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_copy_whose_source_ends_too_early_fails(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(PAGE + 1))
    with (
        (tmp_path / "short").open("rb") as source,
        (tmp_path / "copy").open("wb") as target,
        pytest.raises(OSError, match="4095"),
    ):
        pages.copied(source, 0, 2 * PAGE, target)


def test_where_no_refill_would_work_all_is_left_to_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refill.possible()
    monkeypatch.setattr(refill, "possible", lambda: False)
    Dump(tmp_path, [area(0x10000, 1, FILE_PRIVATE), area(0x20000, 8)], [entry(0x10000, 1), entry(0x20000, 8)])
    assert bulk.lift(tmp_path, PID, tmp_path).size == 0
    monkeypatch.undo()
    assert bulk.lift(tmp_path, PID, tmp_path).size == 0, "too little"


def test_little_memory_is_left_to_criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LEAST_BYTES", 9 * PAGE)
    Dump(tmp_path, [area(0x20000, 8)], [entry(0x20000, 8)])
    assert bulk.lift(tmp_path, PID, tmp_path).size == 0
    assert not (tmp_path / f"bulk-{PID}.map").exists()


def stamp(directory: Path) -> str:
    return refill.stamp(*((directory / f"bulk-{os.getpid()}.{kind}").stat() for kind in ("map", "img")))


@pytest.mark.parametrize("kind", ["map", "img"])
def test_files_of_another_image_of_that_name_are_not_taken(tmp_path: Path, kind: str) -> None:
    """It was removed and made anew while CRIU worked: one half of the memory would be of the old one."""
    with mmap.mmap(-1, PAGE) as room:
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        for end, content in (("map", bulk.table([Run(base, PAGE, 0)])), ("img", b"x" * PAGE)):
            (tmp_path / f"bulk-{os.getpid()}.{end}").write_bytes(content)
        before, one = stamp(tmp_path), tmp_path / f"bulk-{os.getpid()}.{kind}"
        (tmp_path / "new").write_bytes(one.read_bytes())
        (tmp_path / "new").replace(one)
        with pytest.raises(refill.RefillFailed, match="when the restore began"):
            refill.refill(str(tmp_path), os.getpid(), 1, before)
        assert room[:] == bytes(PAGE), "nothing was written"


def test_every_byte_comes_back_to_its_place_whatever_the_number_of_threads(tmp_path: Path) -> None:
    dice = random.Random(2)
    size = 12 << 20
    with mmap.mmap(-1, size) as room:
        base = ctypes.addressof(ctypes.c_char.from_buffer(room))
        stored, runs, at, wanted = bytearray(), list[Run](), 0, bytearray(size)
        while at < size:
            many = min(dice.choice((1, 2, 3, 40, 700)) * PAGE, size - at)
            if dice.random() < 0.8:
                part = dice.randbytes(many)
                runs.append(Run(base + at, many, len(stored)))
                wanted[at : at + many] = part
                stored += part
            stored += b"\0" * PAGE * dice.randrange(2)  # what CRIU kept
            at += many
        (tmp_path / f"bulk-{os.getpid()}.img").write_bytes(stored)
        (tmp_path / f"bulk-{os.getpid()}.map").write_bytes(bulk.table(runs))
        for threads in (1, 4):
            room[:] = bytes(size)
            assert refill.refill(str(tmp_path), os.getpid(), threads, stamp(tmp_path)) == sum(run.size for run in runs)
            assert room[:] == wanted


def test_what_can_t_be_filled_fails_with_the_kernel_s_reason(tmp_path: Path) -> None:
    name = tmp_path / f"bulk-{os.getpid()}"
    name.with_suffix(".img").write_bytes(bytes(PAGE))
    name.with_suffix(".map").write_bytes(bulk.table([Run(PAGE, PAGE, 0)]))
    with pytest.raises(refill.RefillFailed, match="Bad address"):
        refill.refill(str(tmp_path), os.getpid(), 2, stamp(tmp_path))
    name.with_suffix(".img").write_bytes(b"short")
    with pytest.raises(refill.RefillFailed, match="gave 5 bytes of 4096"):
        refill.refill(str(tmp_path), os.getpid(), 1, stamp(tmp_path))
    for table in (b"", bytes(64), bulk.table([Run(PAGE, PAGE, 0)])[:-8]):
        name.with_suffix(".map").write_bytes(table)
        with pytest.raises(refill.RefillFailed, match=r"begins with another|has \d+ bytes"):
            refill.refill(str(tmp_path), os.getpid(), 1, stamp(tmp_path))


def test_no_piece_is_larger_than_the_room_for_it_nor_has_more_vectors_than_the_kernel_takes() -> None:
    runs = [Run(PAGE * at, PAGE, PAGE * (at // 2)) for at in range(1, 6000, 2)]
    words = struct.unpack(f"<{len(bulk.table(runs)) // 8}Q", bulk.table(runs))
    pieces = [words[4 + 2 * words[1] + 4 * one :][:4] for one in range(words[2])]
    assert sum(piece[3] for piece in pieces) == words[3] == len(runs) * PAGE
    assert all(piece[1] <= refill.MOST_VECTORS and piece[3] <= refill.PIECE_BYTES for piece in pieces)
