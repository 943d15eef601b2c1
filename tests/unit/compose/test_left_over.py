"""What doctor says of that which nobody owns any more, in memory and on disk."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from compose import checks
from compose.cli import doctor
from pool.place import abandoned, claim, place
from worker.sources.leaving import note


def test_weights_whose_data_directory_is_gone_are_named_with_their_size_and_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, shared = tmp_path / "run", tmp_path / "shm"
    directory.mkdir()
    shared.mkdir()
    root = place(directory, 1, shared_memory=shared)
    with claim(root, directory):
        (root / "ws_1").mkdir()
        (root / "ws_1" / "00000.segment").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(checks, "pool_places", lambda: abandoned(shared))
    monkeypatch.setattr(checks, "orphans", list)
    monkeypatch.setattr(checks, "wheels", lambda home: [])
    assert list(checks._left_over()) == []
    shutil.rmtree(directory)
    (segments,) = checks._left_over()
    assert segments.verdict == "note"
    assert "weights of 1 planes (3.0 MiB of memory)" in segments.found
    assert str(root) in segments.cure


def test_what_is_to_be_removed_is_a_command_that_can_be_copied_as_doctor_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / f"place {nth}" for nth in range(40)]
    for left in places:
        (left / "folder").mkdir(parents=True)
    monkeypatch.setattr(checks, "pool_places", lambda: places)
    monkeypatch.setattr(checks, "orphans", list)
    monkeypatch.setattr(checks, "wheels", lambda home: [])
    monkeypatch.setattr(doctor, "checks", lambda data, port, running: checks._left_over())
    said = CliRunner().invoke(doctor.doctor, [], obj=tmp_path / "data").output
    told, *command = said[said.index("The next") :].splitlines()
    assert told == "The next `up` removes them; until then:"
    assert [line.strip(" \\") for line in command] == ["rm -r", *(f"'{place}'" for place in places)]
    subprocess.run(["bash", "-ec", "\n".join(command)], check=True, timeout=30)
    assert not any(place.exists() for place in places)


def test_prepared_sources_are_named_with_their_bytes_and_those_that_nothing_needs_apart(tmp_path: Path) -> None:
    assert list(checks._sources(tmp_path)) == []
    for name in (f"hf-{'a' * 24}", f"fake-{'b' * 24}"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "model.safetensors").write_bytes(bytes(2 << 20))
    (found,) = checks._sources(tmp_path)
    assert found.verdict == "ok" and "2 prepared copies of models' sources (4.0 MiB)" in found.found
    note(tmp_path / "models", {f"hf-{'a' * 24}": 1000.0})
    (found,) = checks._sources(tmp_path)
    assert found.verdict == "note" and "nothing needs 1 (2.0 MiB)" in found.found and "10 minutes" in found.cure


def test_what_somebody_removes_meanwhile_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, away, scandir = tmp_path / "place", tmp_path / "away", os.scandir
    (place / "folder").mkdir(parents=True)
    (place / "folder" / "file").write_bytes(bytes(1000))

    def removing(path: str) -> object:
        if Path(path) == place / "folder":
            place.joinpath("folder").rename(away)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert checks._size([place]) == "0 B"
    assert away.exists(), "it was there at first"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's planes leave any")
def test_copies_of_programs_whose_installation_is_gone_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "pool_places", list)
    monkeypatch.setattr(checks, "orphans", list)
    monkeypatch.setattr(checks, "wheels", lambda home: [tmp_path / "install-1"])
    (programs,) = checks._left_over()
    assert programs.verdict == "note" and str(tmp_path / "install-1") in programs.cure
