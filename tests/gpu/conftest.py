"""Tests that need a GPU. Elsewhere each of them is skipped, and says why."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from worker import gpus

_WHY = (
    "no NVIDIA GPU here (NVML finds none)"
    if not gpus.gpus()
    else "cuda-python is missing (pip install cuda-bindings)"
    if find_spec("cuda") is None
    else ""
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if _WHY and not os.environ.get("STANDIN"):
                item.add_marker(pytest.mark.skip(reason=_WHY))


@pytest.fixture
def device() -> gpus.Gpu:
    """The first that CUDA sees."""
    return gpus.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
