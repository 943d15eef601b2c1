"""What the machine can still give, and what a container may still take."""

import os
from pathlib import Path

import pytest

from worker.hostmemory import available_bytes, taken_by

MEMINFO = "MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path


def limited(path: Path, limit: str, current: int, cached: int) -> Path:
    path.mkdir()
    for name, text in (("max", limit), ("current", str(current)), ("stat", f"anon 5\ninactive_file {cached}")):
        (path / f"memory.{name}").write_text(text + "\n")
    return path


def test_without_a_limit_it_is_the_kernels_estimate(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 4000 * 1024
    assert available_bytes(proc, limited(tmp_path / "root", "max", 5, 0)) == 4000 * 1024


def test_a_containers_limit_counts_and_what_it_can_drop_is_free(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, limited(tmp_path / "a", "1000000", 900_000, 50_000)) == 150_000
    assert available_bytes(proc, limited(tmp_path / "b", "1000000", 2_000_000, 0)) == 0
    assert available_bytes(proc, limited(tmp_path / "c", str(1 << 40), 0, 0)) == 4000 * 1024


def test_a_kernel_that_does_not_say_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        available_bytes(tmp_path)


def process(proc: Path, pid: int, pss_kb: int, *children: int) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (task / "children").write_text(" ".join(map(str, children)) + " ")
    (proc / str(pid) / "smaps_rollup").write_text(f"00400000-7fff [rollup]\nRss: 9999 kB\nPss: {pss_kb} kB\nPss_Anon: 1 kB\n")


def test_a_process_takes_what_all_below_it_take(tmp_path: Path) -> None:
    process(tmp_path, 10, 100, 11, 12)
    process(tmp_path, 11, 20)
    process(tmp_path, 12, 3, 13)  # 13 has ended just now
    process(tmp_path, 99, 5000)
    assert taken_by(10, tmp_path) == 123 * 1024
    assert taken_by(77, tmp_path) == 0


def test_what_this_very_process_takes_is_found_out() -> None:
    kept = bytearray(64 << 20)
    kept[:] = b"x" * len(kept)
    assert taken_by(os.getpid()) > len(kept)
