"""Zeros of an engine's memory, with a real CRIU: they leave the disk, and what comes back has them where they were."""

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.commands import Save
from controlplane.events import ImageBuilt, ImageFailed, InstanceUp, OperationFailed
from tests.bench.bench_restore import Bench, memory
from tests.imagehouse import manifest, save, says
from tests.workshop import MIB, Plant
from worker.filedigest import taken_bytes
from worker.holderlink import HolderLink
from worker.holdermessages import Held
from worker.images import bulk, criu, refill, zeros
from worker.images.manifest import ImageBroken, Manifest

PAGE = 4096
pytestmark = pytest.mark.timeout(180)
FEW = 150
"""Pages that differ between a dump and a look at what came back: a parked engine looks for its release."""


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LEAST_BYTES", 1)


@pytest.fixture(autouse=True)
def _zeros_in_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    start = HolderLink.start

    async def heavy(self: HolderLink, argv: tuple[str, ...]) -> Held:
        options = ("--bytes", str(16 * MIB), "--zeros", "0.3", "--threads", "2", "--no-libraries", "--")
        at = argv.index("worker.engines.process") if "worker.engines.process" in argv else None
        return await start(self, argv if at is None else (*argv[:at], "tests.bench.heavy", *options, *argv[at + 1 :]))

    monkeypatch.setattr(HolderLink, "start", heavy)


@pytest.fixture
def bench() -> Iterator[Bench]:
    work = Path(tempfile.mkdtemp(prefix="eh"))
    found = criu.find(work)
    if found is None or criu.probe(found).refusal:
        pytest.skip("no CRIU that works here")
    yield Bench(work, str(found))
    shutil.rmtree(work, ignore_errors=True)


def nowhere(image: Path, pid: int) -> list[tuple[int, int]]:
    """Memory that is written without a byte of the image: where it begins and ends."""
    table = refill.Table(str(image / f"bulk-{pid}.map"))
    found = list[tuple[int, int]]()
    for number in range(table.pieces):
        vectors, count, offset, _ = table.piece(number)
        if offset == refill.ZEROS:
            words = (ctypes.c_size_t * (2 * count)).from_address(vectors)
            found += [(words[at], words[at] + words[at + 1]) for at in range(0, 2 * count, 2)]
    return found


async def test_memory_comes_back_to_the_byte_with_zeros_that_are_nowhere_in_the_image(bench: Bench) -> None:
    """Whole mappings of zeros, runs of all lengths beside full pages and pages of a single byte, areas that are shared."""
    row = await bench.save(64 * MIB, 4, 0.3)
    made = row["hollow"]
    image = bench.work / "hollow"
    places = nowhere(image, bench.pid)
    assert sum(end - start for start, end in places) > 24 * MIB
    nothing = zlib.crc32(bytes(PAGE))
    pages = {page for start, end in places for page in range(start, end, PAGE)}
    assert sum(bench.was.get(page) != nothing for page in pages) < FEW
    areas = bulk.shared(image, bench.pid)
    shared = [page for page in pages if any(area.start <= page < area.end for area in areas)]
    assert len(shared) > 50, "areas that others could share have some too"
    if made["zero_bytes_gone"]:
        assert made["zero_bytes_gone"] == len(pages) * PAGE
        assert made["on_disk"] < row["lifted"]["on_disk"] - 24 * MIB
    for _ in range(2):
        directory, link, _ = await bench.room()
        held = await link.restore(bench.criu, image, pid=bench.pid, place=bench.place, deadline_s=60, parked=True)
        assert held.engine is not None
        now = memory(held.engine.pid)
        assert len(now) >= len(bench.was)
        assert sum(now.get(page) != was for page, was in bench.was.items()) < FEW
        assert sum(now[page] != nothing for page in pages) < FEW
        assert int((directory.path / "refilled").read_text()) == made["bulk_bytes"]
        write_and_look(held.engine.pid, sorted(pages))
        await link.kill(0)
        await link.leave()


async def test_what_is_taken_for_zeros_is_to_the_byte_what_criu_wrote(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeros, "PIECE", 4 * zeros.LEAST_BYTES)
    monkeypatch.setattr(zeros, "PART", 8 * zeros.LEAST_BYTES)
    link, held = await bench.parked(64 * MIB, 4, 0.3)
    assert held.engine is not None
    was, image = memory(held.engine.pid), bench.work / "dumped"
    await link.dump(bench.criu, image, deadline_s=60)
    lifted = bulk.lift(image, held.inner_pid, bench.work)
    assert sum(one.size for one in lifted.zeros) > 8 * MIB
    written = (image / f"bulk-{held.inner_pid}.img").read_bytes()
    assert all(written[one.offset : one.end] == bytes(one.size) for one in lifted.zeros), "to the byte, of what CRIU wrote"
    bulk.hollow(image, held.inner_pid, lifted)
    await link.leave()
    _, link, _ = await bench.room()
    back = await link.restore(bench.criu, image, pid=held.inner_pid, place=held.park_in, deadline_s=60, parked=True)
    assert back.engine is not None
    now = memory(back.engine.pid)
    assert len(now) >= len(was)
    assert sum(now.get(page) != number for page, number in was.items()) < FEW
    await link.kill(0)
    await link.leave()


def write_and_look(pid: int, pages: list[int]) -> None:
    """Pages of zeros can be written to, one at a time: none is another one's."""
    some = pages[:: max(1, len(pages) // 50)]
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        for nth, page in enumerate(some, 1):
            file.seek(page)
            file.write(bytes([nth]) * PAGE)
        for nth, page in enumerate(some, 1):
            file.seek(page)
            assert file.read(PAGE) == bytes([nth]) * PAGE
        for page in set(pages) - set(some):
            file.seek(page)
            assert not any(file.read(64))


@pytest.mark.parametrize("holes", [True, False])
async def test_an_image_counts_as_what_it_takes_of_the_disk_and_its_zeros_as_memory(
    house: Plant, monkeypatch: pytest.MonkeyPatch, holes: bool
) -> None:
    """Also where the file system has no holes: nothing is gained then, and all is as before."""
    if not holes:
        monkeypatch.setattr(bulk, "punch", lambda path, extents: 0)
    await house.register("a")
    before = await says(house, await house.load("a"), "zeros and all")
    await save(house, "a")
    path, made = manifest(house)
    (known,) = house.fleet.images.values()
    built = house.of_type(ImageBuilt)[-1]
    assert (built.size_bytes, built.zero_bytes) == (known.size_bytes, known.zero_bytes) == (made.size_bytes, made.zero_bytes)
    assert made.memory_bytes == made.size_bytes + made.zero_bytes
    places = nowhere(path, made.pid)
    zero_bytes = sum(end - start for start, end in places)
    assert zero_bytes > 4 * MIB
    whole = sum(file.size_bytes for file in made.files)
    if not holes:
        assert (made.zero_bytes, made.size_bytes) == (0, whole)
    elif made.zero_bytes:
        assert made.zero_bytes == zero_bytes
        assert made.size_bytes <= whole - zero_bytes
        assert taken_bytes(path) < made.size_bytes + (len(made.files) + 64) * PAGE, "what the file system needs"
    await house.load("a")
    await save(house, "a")
    again = await house.load("a")
    assert house.of_type(InstanceUp)[-1].image == path.name
    assert await says(house, again, "zeros and all") == before


async def saved(house: Plant) -> tuple[Manifest, Path]:
    """The image of an engine that was loaded, and where the bulk of its bytes is."""
    await house.register("a")
    await house.load("a")
    await save(house, "a")
    path, made = manifest(house)
    return made, path / f"bulk-{made.pid}.img"


async def refused(house: Plant, made: Manifest, store: Path, code: str) -> None:
    """The file is found out, by who verifies the image and by who needs it: a cold start follows."""
    with pytest.raises(ImageBroken, match=store.name) as broken:
        house.worker.images.store.verify(made)
    assert broken.value.code == code
    up = await house.load("a")
    assert house.of_type(InstanceUp)[-1].image is None
    assert await says(house, up, "whole") == "You said: whole"
    assert (await house.until(lambda: house.of_type(ImageFailed)))[-1].code == code


async def test_a_byte_among_the_zeros_of_an_image_is_found_and_a_cold_start_follows(house: Plant) -> None:
    made, store = await saved(house)
    with store.open("r+b") as file:
        file.seek(a_hole(store)[0] + 5)
        file.write(b"\1")
    await refused(house, made, store, "image_corrupt")


def a_hole(store: Path) -> tuple[int, int]:
    """Where the most zeros begin and end that are not on the disk; there is data on both sides."""
    holes, at = list[tuple[int, int]](), 0
    with store.open("rb") as file, contextlib.suppress(OSError):  # ENXIO: nothing but a hole from there on
        while True:
            data = os.lseek(file.fileno(), at, os.SEEK_DATA)
            holes.append((at, data))
            at = os.lseek(file.fileno(), data, os.SEEK_HOLE)
    start, end = max(holes, key=lambda hole: hole[1] - hole[0])
    if end - start < MIB:
        pytest.skip("this file system has no holes")
    return start, end


@pytest.mark.parametrize("where", ["within", "where it ends"])
async def test_an_image_that_ends_in_a_hole_or_beside_it_is_truncated(house: Plant, where: str) -> None:
    made, store = await saved(house)
    start, end = a_hole(store)
    at = {"within": (start + end) // 2, "where it ends": end}
    os.truncate(store, at[where])
    await refused(house, made, store, "image_truncated")


@pytest.mark.parametrize(("owner", "name"), [(zeros, "find"), (bulk, "punch")], ids=["looked for", "taken off"])
async def test_a_disk_that_fails_while_zeros_are_looked_for_or_taken_off_leaves_no_image(
    house: Plant, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, "a sector is gone")

    await house.register("a")
    await house.load("a")
    with monkeypatch.context() as bad:
        bad.setattr(owner, name, failing)
        house.order(Save(model="a"))
        failed: OperationFailed = (await house.until(lambda: house.of_type(OperationFailed)))[-1]
        await house.until(lambda: not house.fleet.instances)
    assert failed.code == "image_failed"
    assert "a sector is gone" in failed.message
    assert not house.of_type(ImageBuilt)
    assert list((house.data / "images").iterdir()) == []
    assert house.processes() == []
