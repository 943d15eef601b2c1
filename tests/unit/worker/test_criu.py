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
