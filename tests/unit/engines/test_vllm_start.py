"""How a vLLM is told where its weights are: by a path that all fine-tunes share, while it starts and no longer."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.engines.vllm_start import kept, settled


def model(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 8}')
    return path


def left(root: Path) -> list[str]:
    return [path.name for path in root.glob("art_*/start-*")]


def test_siblings_are_told_one_path_each_with_its_own_weights_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before, root = os.getcwd(), tmp_path / "artefacts"
    paths, caches = set(), set()
    for name in ("a", "b"):
        source = model(tmp_path / name)
        with kept(root, source, {}, []) as told:
            assert told.resolve() == source
            paths.add(str(told))
            caches.add(os.environ["VLLM_CACHE_ROOT"])
        assert os.getcwd() == before
        config = SimpleNamespace(model_config=SimpleNamespace(model=str(told)))
        settled(config, source)
        assert config.model_config.model == str(source)
    assert len(paths) == len(caches) == 1
    assert left(root) == []


def test_a_start_that_fails_leaves_working_directory_and_weights_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before, source, root = os.getcwd(), model(tmp_path / "a"), tmp_path / "artefacts"
    with pytest.raises(RuntimeError, match="no memory"), kept(root, source, {}, []):
        raise RuntimeError("no memory")
    assert os.getcwd() == before
    assert (source / "config.json").is_file() and left(root) == []


@pytest.mark.parametrize("devices", [[], ["GPU-1", "GPU-2"]])
def test_ranks_and_whoever_keeps_nothing_are_told_the_weights_own_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    """Ranks live on in the directory that they were started in."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr("worker.gpus.architecture", lambda _: "sm_90")
    before, source = os.getcwd(), model(tmp_path / "a")
    with kept(tmp_path / "artefacts" if devices else None, source, {}, devices) as told:
        assert told == source and os.getcwd() == before
