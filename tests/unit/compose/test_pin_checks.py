"""What `doctor` says of pins that pin nothing, and of engines that are not on disk."""

from pathlib import Path
from typing import Any

import pytest

from compose import pinchecks
from compose.pinchecks import pin_check
from compose.refusal import ApiRefused
from compose.unsavedchecks import unsaved_check
from controlplane.plane import Plane

MODEL = '[[model]]\nname = "writer"\nsource = "fake:"\nengine = "fake"\n'


def house(data: Path, pins: str) -> None:
    (data / "e.toml").write_text(f"[images]\npin = {pins}\n{MODEL}" if pins else MODEL)
    Plane(data=str(data), postgres_url="", nats_url="", pool_bytes=1, settings_path=str(data / "e.toml")).write()


def test_without_pins_or_without_a_plane_there_is_no_line(tmp_path: Path) -> None:
    assert list(pin_check(tmp_path, running=False)) == []
    house(tmp_path, "")
    assert list(pin_check(tmp_path, running=False)) == []


def test_a_pin_that_no_model_of_the_file_has_is_a_note(tmp_path: Path) -> None:
    house(tmp_path, '["writer", "cfg_0123456789abcdef", "writr"]')
    [line] = pin_check(tmp_path, running=False)
    assert line.verdict == "note" and '"writr"' in line.found and line.cure
    assert '"writer"' not in line.found and "cfg_" not in line.found
    house(tmp_path, '["writer"]')
    [line] = pin_check(tmp_path, running=False)
    assert (line.verdict, line.found) == ("ok", "[images] pin: writer")


def test_a_plane_that_runs_knows_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house(tmp_path, '["writr"]')
    monkeypatch.delenv("ENGINEHOUSE_URL", raising=False)
    answers: list[Any] = [
        [{"notes": []}],
        [{"notes": ["no such thing"]}, {"notes": ["no such thing"]}],
        ApiRefused(503, "unavailable", "away", None),
    ]

    class Knows:
        def get(self, *path: str) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def close(self) -> None: ...

    monkeypatch.setattr(pinchecks.Client, "of", staticmethod(lambda data, timeout_s: Knows()))
    [line] = pin_check(tmp_path, running=True)
    assert line.verdict == "ok", "it was added over the API"
    [line] = pin_check(tmp_path, running=True)
    assert (line.verdict, line.found) == ("note", "no such thing")
    [line] = pin_check(tmp_path, running=True)
    assert '"writr"' in line.found, "it does not answer: the file is all there is"


def test_engines_that_are_not_on_disk_are_a_note_while_the_plane_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENGINEHOUSE_URL", raising=False)

    class Knows:
        def get(self, *path: str) -> Any:
            return [{"unsaved": ["ins_1 (a) is not on disk (no_space): so"]}, {"unsaved": []}, {}]

        def close(self) -> None: ...

    monkeypatch.setattr(pinchecks.Client, "of", staticmethod(lambda data, timeout_s: Knows()))
    assert list(unsaved_check(tmp_path, running=False)) == []
    [line] = unsaved_check(tmp_path, running=True)
    assert (line.name, line.verdict, line.found) == ("unsaved", "note", "ins_1 (a) is not on disk (no_space): so")
    assert "quota" in line.cure
