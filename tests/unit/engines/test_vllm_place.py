"""Which GPUs an engine is shown, in which order."""

import pytest

from worker import gpus
from worker.engines.vllm_place import ordinals


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = tuple(gpus.Gpu(f"GPU-{name}", "H200", 1 << 37, index) for index, name in enumerate("abc"))
    monkeypatch.setattr(gpus, "gpus", lambda: here)
    monkeypatch.setattr(gpus, "leave", lambda: None)


def test_an_engine_on_one_gpu_has_it_first_and_sees_the_others_behind_it() -> None:
    assert ordinals(("GPU-b",)) == "1,0,2"


def test_a_gang_sees_its_own_alone_in_order_of_rank() -> None:
    assert ordinals(("GPU-c", "GPU-a")) == "2,0"


def test_a_gpu_that_is_not_here_is_named() -> None:
    with pytest.raises(SystemExit, match="GPU-x"):
        ordinals(("GPU-x",))
