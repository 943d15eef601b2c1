"""What will have to be on the disk begins its way early."""

from pathlib import Path

import pytest

from worker.images import writeback


def test_what_is_begun_with_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "pages-1.img"
    path.write_bytes(b"x" * 100_000)
    writeback.begin(path)
    assert path.read_bytes() == b"x" * 100_000
    with pytest.raises(FileNotFoundError):
        writeback.begin(tmp_path / "gone")
