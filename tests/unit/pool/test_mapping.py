"""A reservation: the same addresses whatever comes and goes there, never writable, never in anybody's way."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pool.mapping import HUGE_PAGE, PAGE, Reservation

Segment = Callable[[int], int]


@pytest.fixture
def segment() -> Iterator[Segment]:
    made: list[int] = []

    def make(fill: int, pages: int = 3) -> int:
        fd = os.memfd_create("segment")
        os.write(fd, bytes([fill]) * PAGE * pages)
        made.append(fd)
        return fd

    yield make
    for fd in made:
        os.close(fd)


def regions(address: int, size: int) -> list[str]:
    """Lines of /proc/self/maps that overlap."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if start < address + size and end > address:
                found.append(line)
    return found


def test_views_stay_where_they_are_while_sets_change(segment: Segment) -> None:
    reservation = Reservation(6 * PAGE)
    assert reservation.address % HUGE_PAGE == 0
    view = reservation.view(0, 6 * PAGE)
    for first, second in ((1, 2), (3, 4), (5, 6)):
        reservation.attach([segment(first), segment(second)], [3 * PAGE, 3 * PAGE])
        assert reservation.start(1) == 3 * PAGE
        assert np.array_equal(np.unique(view), [first, second])
        assert (view[0], view[-1]) == (first, second)
        assert all("r--s" in line for line in regions(reservation.address, 6 * PAGE))
        reservation.detach()
        assert reservation.attached_bytes == 0
        assert all("---p" in line for line in regions(reservation.address, 6 * PAGE))
    assert view.ctypes.data == reservation.address


def test_what_does_not_fit_leaves_it_detached(segment: Segment) -> None:
    reservation = Reservation(4 * PAGE)
    for fds, sizes in (
        ([segment(1)], [PAGE, PAGE]),
        ([segment(1)], [PAGE - 1]),
        ([segment(1)], [0]),
        ([], []),
        ([segment(1)], [4 * PAGE]),
        ([segment(1), segment(2)], [3 * PAGE, 3 * PAGE]),
    ):
        with pytest.raises(ValueError, match=r"descriptors for|reservation of|whose file has"):
            reservation.attach(fds, sizes)
    pipe = os.pipe()
    with pytest.raises((OSError, ValueError)):
        reservation.attach([segment(1), pipe[0]], [PAGE, PAGE])
    for fd in pipe:
        os.close(fd)
    assert all("---p" in line for line in regions(reservation.address, 4 * PAGE))
    reservation.attach([segment(1)], [2 * PAGE], populate=True)
    with pytest.raises(ValueError, match="already attached"):
        reservation.attach([segment(1)], [2 * PAGE])


def test_views_are_within_bounds() -> None:
    reservation = Reservation(1)
    assert reservation.size == PAGE
    for offset, size in ((-1, 1), (0, PAGE + 1), (PAGE, 1), (0, -1)):
        with pytest.raises(ValueError, match="of a reservation of"):
            reservation.view(offset, size)
    assert reservation.view(PAGE, 0).size == 0
    with pytest.raises(ValueError, match="at least 1"):
        Reservation(0)


def test_addresses_go_back_with_the_last_view(segment: Segment) -> None:
    reservation = Reservation(3 * PAGE)
    reservation.attach([segment(7)], [3 * PAGE])
    view = reservation.view(0, 8).view(np.uint32)
    address = reservation.address
    del reservation
    gc.collect()
    assert view[0] == 0x07070707
    del view
    gc.collect()
    assert not any("memfd:segment" in line for line in regions(address, 3 * PAGE))


def test_a_write_or_a_read_after_detach_is_a_fault() -> None:
    program = (
        "import os, sys; from pool.mapping import Reservation, PAGE\n"
        "fd = os.memfd_create('s'); os.ftruncate(fd, PAGE)\n"
        "r = Reservation(PAGE); v = r.view(0, PAGE); r.attach([fd], [PAGE])\n"
        "exec(sys.argv[1])"
    )
    for act in ("v[0] = 1", "r.detach(); v.sum()"):
        ended = subprocess.run([sys.executable, "-c", program, act], check=False, capture_output=True)
        assert ended.returncode == -signal.SIGSEGV, ended.stderr
