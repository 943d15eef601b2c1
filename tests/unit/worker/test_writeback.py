"""What will have to be on the disk begins its way early."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker.images import writeback


def test_a_growing_file_is_begun_with_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, told, ended = list[tuple[str, int, int]](), threading.Semaphore(0), threading.Event()

    def begin(path: Path, at: int = 0, size: int = 0) -> None:
        begun.append((path.name, at, size))
        told.release()
        if path.name == "pages-2.img":
            raise OSError("renamed just now")

    monkeypatch.setattr(writeback, "begin", begin)
    monkeypatch.setattr(writeback, "POLL_S", 0.001)
    monkeypatch.setattr(writeback, "LEAST_BYTES", 100)
    (tmp_path / "core-1.img").write_bytes(bytes(1000))
    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(writeback.follow, tmp_path, "pages-*.img", ended)
        with (tmp_path / "pages-1.img").open("ab", buffering=0) as pages:
            pages.write(bytes(150))
            assert told.acquire(timeout=30)
            pages.write(bytes(50))  # too little
            pages.write(bytes(100))
            assert told.acquire(timeout=30)
        (tmp_path / "pages-2.img").write_bytes(bytes(500))
        assert told.acquire(timeout=30)
        ended.set()
        following.result(30)
    ours = [one for one in begun if one[0] == "pages-1.img"]
    assert ours[0] == ("pages-1.img", 0, 150)
    assert sum(size for _, _, size in ours) == 300, "nothing twice"
    assert {name for name, _, _ in begun} == {"pages-1.img", "pages-2.img"}


def test_what_is_begun_with_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "pages-1.img"
    path.write_bytes(b"x" * 100_000)
    writeback.begin(path)
    writeback.begin(path, 4096, 8192)
    assert path.read_bytes() == b"x" * 100_000
    with pytest.raises(FileNotFoundError):
        writeback.begin(tmp_path / "gone")
