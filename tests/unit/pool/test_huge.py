"""Memory for segments: all of it there, zeroed, in huge pages where the kernel gives them, and elsewhere all the same."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool import huge
from pool.mapping import HUGE_PAGE, PAGE, Reservation, collapse

SHM = Path("/dev/shm")
MIB = 1 << 20


@pytest.fixture
def shared() -> Iterator[int]:
    """A new file in shared memory."""
    fd = os.memfd_create("segment")
    yield fd
    os.close(fd)


def mapped_huge(address: int) -> int:
    """Bytes of our mapping at `address` that are mapped by huge pages."""
    found = re.search(rf"^{address:x}-.*?ShmemPmdMapped:\s+(\d+) kB", Path("/proc/self/smaps").read_text(), re.M | re.S)
    assert found is not None
    return int(found[1]) << 10


def collapses(size: int = HUGE_PAGE) -> bool:
    """Whether the kernel has huge pages to give, now."""
    fd = os.memfd_create("probe")
    try:
        os.posix_fallocate(fd, 0, size)
        return collapse(fd, 0, size)
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [PAGE, HUGE_PAGE - PAGE, HUGE_PAGE, 9 * MIB, 40 * MIB + PAGE])
def test_all_of_it_is_there_and_zeroed(shared: int, size: int) -> None:
    huge.allocate(shared, 0, size)
    state = os.fstat(shared)
    assert state.st_size == size and state.st_blocks * 512 >= size
    assert os.pread(shared, size, 0) == bytes(size)


def test_what_is_there_stays_when_more_is_asked_for(shared: int) -> None:
    huge.allocate(shared, 0, 3 * MIB)
    os.pwrite(shared, b"kept", 3 * MIB - 4)
    huge.allocate(shared, 3 * MIB, 6 * MIB)
    assert os.fstat(shared).st_size == 9 * MIB and os.pread(shared, 4, 3 * MIB - 4) == b"kept"


@pytest.mark.skipif(not collapses(), reason="this kernel gives no huge pages on request")
def test_an_engine_maps_it_by_huge_pages(shared: int) -> None:
    huge.allocate(shared, 0, 8 * MIB + PAGE)
    reservation = Reservation(8 * MIB + PAGE)
    reservation.attach([shared], [8 * MIB + PAGE], populate=True)
    found = mapped_huge(reservation.address)
    if found != 8 * MIB and not collapses(8 * MIB):
        pytest.skip("memory is too strewn for huge pages now")
    assert found == 8 * MIB


def test_a_file_elsewhere_gets_small_pages(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "segment", os.O_RDWR | os.O_CREAT)
    try:
        huge.allocate(fd, 0, 5 * MIB)
        assert os.fstat(fd).st_blocks * 512 >= 5 * MIB
    finally:
        os.close(fd)


def test_a_kernel_that_has_none_to_give_is_asked_once_a_segment(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def none(fd: int, offset: int, size: int) -> bool:
        asked.append(offset)
        return False

    monkeypatch.setattr(huge, "collapse", none)
    huge.allocate(shared, 0, 100 * MIB)
    assert asked == [0] and os.fstat(shared).st_blocks * 512 == 100 * MIB
