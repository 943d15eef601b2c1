"""Bytes on their way from files into segments: each way there gives the same set, and the set before shows nowhere."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from pool import stage
from pool.arena import Arena, Draft
from pool.layout import gaps, lay_out
from pool.mapping import HUGE_PAGE, map_shared, unmap
from pool.safetensors import BadSource, Source, read_source
from pool.slabs import Slab
from pool.spares import Spare
from tests.poolroom import write_safetensors

MIB = 1 << 20
SIZES = (5, 2 * MIB + 3, 3 * MIB, 0, 65)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "source"
    path.mkdir()
    random = np.random.default_rng(1)
    arrays = {f"t{number}": random.integers(1, 255, size, dtype=np.uint8) for number, size in enumerate(SIZES)}
    write_safetensors(path / "model.safetensors", arrays)
    return read_source(str(path))


@pytest.fixture(params=["through a buffer", "into a mapping", "into what is mapped already"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(stage, "in_huge_pages", lambda fd, size: request.param == "into a mapping")
    return str(request.param)


@pytest.fixture
def slabs() -> Iterator[list[Slab]]:
    made: list[Slab] = []
    yield made
    for slab in made:
        unmap(slab.address, slab.size)


def used(tmp_path: Path, sizes: tuple[int, ...]) -> dict[int, Spare]:
    """Memory in which another set has been."""
    found = {}
    for number, size in enumerate(sizes):
        path = tmp_path / f"spare-{number}"
        path.write_bytes(b"\xff" * size)
        found[number] = Spare(path, os.open(path, os.O_RDWR), size, dirty=True)
    return found


def drafted(tmp_path: Path, source: Source, way: str, slabs: list[Slab]) -> Draft:
    layout = lay_out(source.entries, segment_bytes=3 * MIB)
    covered = [(placed.segment, placed.offset, placed.entry.size_bytes) for placed in layout.tensors]
    draft = Arena(tmp_path).begin(layout.segments, gaps(layout.segments, covered))
    spares = used(tmp_path, layout.segments)
    if way == "into what is mapped already":
        for spare in spares.values():
            spare.slab = Slab.over(spare.fd, spare.size)
            slabs.append(spare.slab)
    draft.use(spares)
    return draft


def test_a_set_is_what_its_files_say_and_nothing_else(tmp_path: Path, source: Source, way: str, slabs: list[Slab]) -> None:
    draft, layout = drafted(tmp_path, source, way, slabs), lay_out(source.entries, segment_bytes=3 * MIB)
    progress = stage.Progress()
    tensors = stage.copy(source, layout, draft, progress)
    file = (Path(source.path) / "model.safetensors").read_bytes()
    covered = [np.zeros(size, bool) for size in layout.segments]
    for tensor, placed in zip(tensors, layout.tensors, strict=True):
        entry = placed.entry
        bytes_ = file[entry.offset : entry.offset + entry.size_bytes]
        assert os.pread(draft.fds[tensor.segment], tensor.size_bytes, tensor.offset) == bytes_
        assert tensor.digest == blake3(bytes_).hexdigest()
        covered[tensor.segment][tensor.offset : tensor.offset + tensor.size_bytes] = True
    for number, size in enumerate(layout.segments):
        rest = np.frombuffer(os.pread(draft.fds[number], size, 0), np.uint8)[~covered[number]]
        assert not rest.any(), "between tensors there is nothing of the set before"
    assert progress.done_bytes == sum(SIZES)
    assert stage.bad_tensors(draft.fds, tensors, stage.Progress()) == ()
    draft.discard()


def test_a_file_that_ends_early_is_refused_on_every_way(tmp_path: Path, source: Source, way: str, slabs: list[Slab]) -> None:
    draft, layout = drafted(tmp_path, source, way, slabs), lay_out(source.entries, segment_bytes=3 * MIB)
    opened = stage.open_file

    def shorter(directory: str, name: str):  # type: ignore[no-untyped-def]
        fd, state = opened(directory, name)
        os.truncate(f"/proc/self/fd/{fd}", state.size_bytes - 1)
        return fd, state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "open_file", shorter)
        with pytest.raises(BadSource, match=r"ends at|changed"):
            stage.copy(source, layout, draft, stage.Progress())
    draft.discard()


def reserved() -> set[str]:
    """Ranges of addresses without memory and without a name."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {fields[0] for fields in lines if fields[1] == "---p" and len(fields) == 5}


def test_a_mapping_starts_on_a_huge_page_and_leaves_nothing_beside_it() -> None:
    before = reserved()
    fds = [os.memfd_create("segment-on-huge-pages") for _ in range(3)]
    places = []
    for fd, size in zip(fds, (5, HUGE_PAGE, 3 * MIB), strict=True):
        os.ftruncate(fd, size)
        places.append((map_shared(fd, size), size))
    assert [address % HUGE_PAGE for address, _ in places] == [0, 0, 0]
    assert Path("/proc/self/maps").read_text().count("memfd:segment-on-huge-pages") == 3
    for address, size in places:
        unmap(address, size)
    assert reserved() <= before


def test_a_staging_that_nobody_waits_for_takes_no_more_memory(tmp_path: Path, source: Source) -> None:
    layout = lay_out(source.entries, segment_bytes=3 * MIB)
    draft = Arena(tmp_path).begin(layout.segments, {})
    progress = stage.Progress()
    progress.cancel()
    with pytest.raises(stage.Cancelled):
        stage.copy(source, layout, draft, progress)
    assert draft.missing_bytes == layout.size_bytes
    draft.discard()


@pytest.mark.parametrize(("before", "after"), [(0, stage.NICENESS), (15, 15)])
def test_who_hashes_makes_way_and_never_less_than_the_daemon_does(before: int, after: int) -> None:
    found = list[int]()

    def hashing() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(before, os.getpriority(os.PRIO_PROCESS, thread)))
        stage.yield_to_copies()
        found.append(os.getpriority(os.PRIO_PROCESS, thread))

    thread = threading.Thread(target=hashing)
    thread.start()
    thread.join()
    assert found == [max(after, os.getpriority(os.PRIO_PROCESS, 0))]
