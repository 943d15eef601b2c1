"""Which GPUs count, by what the environment names."""

import pytest

from worker import gpus


def test_what_the_environment_names_counts_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    here = tuple(gpus.Gpu(f"GPU-{letter}", "H", 1, index) for index, letter in enumerate("abc"))
    monkeypatch.setattr(gpus, "gpus", lambda: here)
    assert gpus.visible(None) == here
    assert gpus.visible("2, GPU-a,2") == (here[2], here[0])
    assert gpus.visible("") == gpus.visible("7,GPU-x") == ()
