"""What an engine brings lands where it says, whichever way it is written, and nowhere else."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from pool import filling
from pool.filling import Filling
from pool.mapping import HUGE_PAGE

SIZES = (HUGE_PAGE, 2 * HUGE_PAGE + 4096)


def refused(fd: int, size: int) -> int:
    os.close(fd)
    raise OSError(errno.ENOMEM, "no addresses are left")


@pytest.mark.parametrize("way", ["into a mapping", "by the kernel", "by the kernel, where a mapping is refused"])
def test_bytes_land_where_they_are_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(filling, "in_huge_pages", lambda fd, size: way != "by the kernel")
    if way.endswith("refused"):
        monkeypatch.setattr(filling, "map_shared", refused)
    fds = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(len(SIZES))]
    for fd, size in zip(fds, SIZES, strict=True):
        os.ftruncate(fd, size)
    expected = [bytearray(size) for size in SIZES]
    random = np.random.default_rng(0)
    with Filling(fds, SIZES) as segments:
        for segment, offset, size in ((0, 0, 10), (1, HUGE_PAGE - 5, 4101), (1, SIZES[1] - 7, 7), (0, HUGE_PAGE, 0)):
            some = random.integers(0, 255, size, dtype=np.uint8)
            segments.write(segment, offset, some.data)
            expected[segment][offset : offset + size] = some.tobytes()
        with pytest.raises(ValueError, match="of a segment of"):
            segments.write(0, HUGE_PAGE - 1, memoryview(bytearray(2)))
    assert [os.pread(fd, size, 0) for fd, size in zip(fds, SIZES, strict=True)] == expected
    for fd in fds:
        os.close(fd)
