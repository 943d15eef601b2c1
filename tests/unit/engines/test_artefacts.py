"""What engines keep from start to start: for whom it is, who shares it, when it goes."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from worker.engines.artefacts import REST_S, Artefacts, Entry, environment, facts, over

CODE = """
import os, sys
from pathlib import Path
from worker.engines.artefacts import Artefacts
with Artefacts(Path(sys.argv[1])).starting("art_1") as place:
    (place / "triton").mkdir()
    os.kill(os.getpid(), 9)
"""


def _source(path: Path, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    given = {"model_type": "llama", "hidden_size": 8, "_name_or_path": str(path), "eos_token_id": 3, **config}
    (path / "config.json").write_bytes(msgspec.json.encode(given))
    return path


def _made(source: Path, **others: Any) -> str:
    given: dict[str, Any] = {"arguments": {"max_num_seqs": 4, "kv_bytes": 1}, "driver": "580", "architectures": ["9.0"]}
    return facts("vllm", source, **{**given, **others}).fingerprint


def _fail(kept: Artefacts) -> None:
    with contextlib.suppress(RuntimeError), kept.starting("art_1"):
        raise RuntimeError("the start failed")


def test_fine_tunes_of_one_architecture_share_and_every_change_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _made(_source(tmp_path / "a"))
    assert _made(_source(tmp_path / "b", eos_token_id=5)) == first
    assert _made(_source(tmp_path / "b"), arguments={"max_num_seqs": 4, "kv_bytes": 2}) == first
    others = [
        _made(_source(tmp_path / "c", hidden_size=16)),
        _made(_source(tmp_path / "a"), arguments={"max_num_seqs": 8}),
        _made(_source(tmp_path / "a"), driver="581"),
        _made(_source(tmp_path / "a"), architectures=["10.0"]),
        _made(_source(tmp_path / "a"), architectures=["9.0", "9.0"]),
    ]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another")
    others.append(_made(_source(tmp_path / "a")))
    assert len({first, *others}) == 7


def test_every_library_writes_into_the_place_and_nowhere_else(tmp_path: Path) -> None:
    assert all(Path(value).parent == tmp_path for value in environment(tmp_path).values())


def test_the_longest_unused_go_first_until_the_rest_fits() -> None:
    entries = [Entry("old", 5, 9 * REST_S), Entry("older", 4, 99 * REST_S), Entry("new", 3, REST_S / 2)]
    assert over(entries, 12) == ()
    assert over(entries, 11) == ("older",)
    assert over(entries, 5) == ("older", "old")
    assert over(entries, 1) == ("older", "old"), "what is in use stays"


def test_what_was_made_is_there_for_the_next_and_what_is_over_the_cap_is_not(tmp_path: Path) -> None:
    kept = Artefacts(tmp_path / "artefacts", cap_bytes=200_000)
    with kept.starting("art_1") as place:
        (place / "kernel").write_bytes(b"x" * 150_000)
    with kept.starting("art_1") as place:
        assert (place / "kernel").exists()
        with kept.starting("art_1") as same:  # two at once
            assert same == place
    with kept.starting("art_2") as place:
        (place / "kernel").write_bytes(b"x" * 150_000)
    os.utime(tmp_path / "artefacts" / "art_1" / "used", (1, 1))
    with kept.starting("art_3"):
        pass
    assert {entry.name for entry in kept.entries()} == {"art_2", "art_3"}
    assert (tmp_path / "artefacts").stat().st_mode & 0o777 == 0o700


def test_what_an_engine_died_with_is_not_used_again(tmp_path: Path) -> None:
    died = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], check=False, cwd=Path(__file__).parents[3])
    assert died.returncode == -9
    assert (tmp_path / "art_1" / "triton").exists()
    kept = Artefacts(tmp_path)
    with kept.starting("art_1") as place:
        assert not (place / "triton").exists()
        (place / "triton").mkdir()
    assert (place / "triton").exists()
    _fail(kept)
    with kept.starting("art_1") as place:
        assert not (place / "triton").exists()


def test_what_another_is_starting_with_stays_until_it_has(tmp_path: Path) -> None:
    kept = Artefacts(tmp_path)
    with kept.starting("art_1") as place:
        (place / "triton").mkdir()
        _fail(kept)
        with kept.starting("art_1"):
            assert (place / "triton").exists(), "the first one writes there"
    with kept.starting("art_1") as place:
        assert not (place / "triton").exists()
