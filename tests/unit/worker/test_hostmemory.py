"""What the machine can still give, and what a container may still take."""

from pathlib import Path

import pytest

from worker.hostmemory import available_bytes

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
