"""Which CRIU is taken, of several."""

from pathlib import Path

import pytest

from worker.images import criu


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o700)
    return path


def test_the_installers_is_taken_before_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, installed = program(tmp_path / "bin" / "criu"), tmp_path / "opt" / "criu"
    monkeypatch.setenv("PATH", str(system.parent))
    monkeypatch.setattr(criu, "INSTALLED", installed)
    assert criu.find(tmp_path) == system
    program(installed)
    assert criu.find(tmp_path) == installed


def test_what_is_named_comes_first_and_the_data_directorys_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criu, "INSTALLED", program(tmp_path / "opt" / "criu"))
    own, named = program(tmp_path / "data" / "criu" / "criu"), program(tmp_path / "named" / "criu")
    assert criu.find(tmp_path / "data") == own
    assert criu.find(tmp_path / "data", str(named)) == named


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (8, 8), (16, 16), (32, 16), (128, 16)])
def test_memory_is_filled_by_as_many_threads_as_there_are_cores_up_to_the_most_that_was_tried(cores: int, threads: int) -> None:
    assert criu.filling_threads(cores) == threads


def test_the_threads_follow_the_cores_that_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("map", "img"):
        (tmp_path / f"bulk-1001.{kind}").write_bytes(b"")
    for cores, threads in ((3, "3"), (64, "16")):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert criu.refill_script(tmp_path, 1001, tmp_path / "script", tmp_path / "mark")
        assert (tmp_path / "script").read_text().split()[-2:] == [threads, str(tmp_path / "mark")]
