"""What is done to fill a device, and in which order."""

import ctypes
import os
from collections.abc import Iterator

import pytest

from pool import fill as filling
from pool.blocks import Groups, cut
from pool.fill import RESERVE_BYTES, OnDevice, fill, free, plan, refill
from pool.gpu import Block
from pool.making import Making
from pool.mapping import map_shared, unmap
from pool.pace import Pace
from pool.residency import Refused
from pool.slabs import Slab, Slabs
from tests.fakegpu import FakeGpu

MIB = 1 << 20


def slabs(*parts: Slab) -> Slabs:
    return Slabs("ws_1", list(parts))


def singles(of: Slabs) -> Groups:
    return cut((), [part.size for part in of.parts])


def test_pinned_segments_travel_first_while_the_rest_is_pinned() -> None:
    given = slabs(Slab(0, 4 * MIB, pinned=2 * MIB), Slab(0, 2 * MIB, pinned=2 * MIB), Slab(0, 2 * MIB, refused=True))
    steps = plan(FakeGpu(), given, singles(given))
    assert [(step.block, step.register) for step in steps] == [(1, False), (0, True), (2, False)]


def test_a_device_with_just_the_room_takes_it() -> None:
    given = slabs(Slab(0, 4 * MIB))
    assert len(plan(FakeGpu(total_bytes=4 * MIB + RESERVE_BYTES), given, singles(given))) == 1


def test_one_byte_too_few_is_refused_with_both_numbers_and_who_has_the_rest() -> None:
    gpu = FakeGpu(total_bytes=4 * MIB + RESERVE_BYTES, foreign_bytes=1)
    with pytest.raises(Refused, match=r"4194304 bytes on GPU-fake, 4194303 .*process 4711 has 1") as refused:
        plan(gpu, slabs(Slab(0, 4 * MIB)), ((0,),))
    assert refused.value.refusal.code == "device_full"
    assert (refused.value.refusal.need_bytes, refused.value.refusal.free_bytes) == (4 * MIB, 4 * MIB - 1)


def test_segments_that_a_device_cannot_hold_are_refused() -> None:
    with pytest.raises(Refused) as refused:
        plan(FakeGpu(), slabs(Slab(0, 4096)), ((0,),))
    assert refused.value.refusal.code == "bad_layout"


def test_a_block_that_does_not_go_keeps_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    blocks = [gpu.create(2 * MIB) for _ in range(3)]
    destroy = gpu.destroy

    def fails_once(block: Block) -> None:
        if block is blocks[0]:
            raise OSError(719, "cuMemUnmap")
        destroy(block)

    monkeypatch.setattr(gpu, "destroy", fails_once)
    with pytest.raises(OSError, match="cuMemUnmap"):
        free(gpu, OnDevice(list(blocks), [gpu.export(block) for block in blocks]))
    assert list(gpu.blocks.values()) == [blocks[0]]
    destroy(blocks[0])


class Clock:
    """Stands still but while a copy is slowed."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_what_a_slowed_copy_waits_is_not_taken_for_what_memory_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, making, clock, size = FakeGpu(), Making(), Clock(), 2 * MIB
    source = ctypes.create_string_buffer(size)
    seen: list[tuple[int, int, float]] = []
    there: list[OnDevice] = []
    monkeypatch.setattr(filling, "time", clock)
    monkeypatch.setattr(making, "saw", lambda *what: seen.append(what))
    given = slabs(*[Slab(ctypes.addressof(source), size, pinned=size) for _ in range(40)])
    fill(gpu, given, singles(given), there.append, making=making, pace=Pace(size, clock=clock.monotonic, wait=clock.wait))
    assert clock.now == pytest.approx(39)
    ((early, beside, seconds),) = seen
    assert (early + beside, seconds) == (40, 0)
    free(gpu, there[0])


@pytest.fixture
def pinned() -> Iterator[Slab]:
    fd = os.memfd_create("segment")
    os.ftruncate(fd, 4096)
    slab = Slab(map_shared(fd, 4096), 4096, pinned=4096)
    yield slab
    unmap(slab.address, slab.size)


def test_a_set_that_cannot_be_mapped_leaves_alone_what_is_pinned(pinned: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []

    def mapped(fd: int, size: int) -> int:
        if size > 4096:
            raise OSError(12, "no more addresses")
        return fd

    monkeypatch.setattr("pool.slabs.map_shared", mapped)
    monkeypatch.setattr("pool.slabs.unmap", lambda address, size: gone.append(address))
    monkeypatch.setattr("pool.slabs._writable", lambda fd: fd)
    with pytest.raises(OSError, match="no more addresses"):
        slabs().map((1, 2, 3), (4096, 4096, 8192), {0: pinned})
    assert gone == [2]


def test_descriptors_that_are_told_stay_open_when_the_copy_fails(pinned: Slab) -> None:
    gpu, there = FakeGpu(failing=True, granularity=4096), list[OnDevice]()
    with pytest.raises(OSError, match="a copy failed"):
        fill(gpu, slabs(pinned), ((0,),), there.append)
    assert gpu.blocks == {}
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in there[0].fds] == ["/memfd:block (deleted)"], "a thread may send them"
    free(gpu, OnDevice([], there[0].fds))


def test_segments_that_lie_side_by_side_come_in_one_block_each_in_its_place() -> None:
    gpu, sizes = FakeGpu(), (2 * MIB, 4 * MIB, 2 * MIB)
    sources = [ctypes.create_string_buffer(bytes([65 + number]) * size, size) for number, size in enumerate(sizes)]
    given = slabs(*[Slab(ctypes.addressof(s), n, pinned=n) for s, n in zip(sources, sizes, strict=True)])
    there: list[OnDevice] = []
    fill(gpu, given, ((2, 0), (1,)), there.append)
    (made,) = there
    assert [block.size for block in made.blocks] == [4 * MIB, 4 * MIB]
    assert len(made.fds) == 2
    found = [ctypes.string_at(block.address, block.size) for block in made.blocks]
    assert found == [b"C" * sizes[2] + b"A" * sizes[0], b"B" * sizes[1]]
    ctypes.memset(sources[0], ord("x"), sizes[0])
    refill(gpu, given, made)
    assert ctypes.string_at(made.blocks[0].address, 4 * MIB) == b"C" * sizes[2] + b"x" * sizes[0]
    free(gpu, made)
    assert gpu.blocks == {}
