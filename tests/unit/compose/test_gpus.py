"""Which GPUs a machine offers."""

import pytest

from compose import gpus
from compose.refusal import EnvironmentRefusal
from worker.gpus import Gpu

GIB = 1 << 30
TWO = (Gpu("GPU-a", "big", 140 * GIB, 0), Gpu("GPU-b", "small", 16 * GIB, 1))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.gpus.gpus", lambda: TWO)
    monkeypatch.setattr(gpus, "NEEDED", ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_all_are_offered_and_something_is_left_of_each() -> None:
    offered = gpus.look(None).devices
    assert [(one.device, one.name, one.kind, one.size_bytes) for one in offered] == [
        ("GPU-a", "gpu0", "gpu", 138 * GIB), ("GPU-b", "gpu1", "gpu", 15 * GIB),
    ]  # fmt: skip


def test_those_that_are_shown_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for shown in ("1", "GPU-b", "GPU-b, 7"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        assert [one.device for one in gpus.look(None).devices] == ["GPU-b"]
    assert [one.device for one in gpus.look(("GPU-a",)).devices] == ["GPU-a"], "the settings say so"
    assert gpus.look(()).devices == ()
    with pytest.raises(EnvironmentRefusal, match="no GPU GPU-c; it has GPU-a, GPU-b"):
        gpus.look(("GPU-c",))


def test_what_is_missing_to_use_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "NEEDED", ("msgspec", "no_such_package", "no_such.part"))
    found = gpus.look(None)
    assert (len(found.gpus), found.missing, found.devices) == (2, "no_such_package", ())
