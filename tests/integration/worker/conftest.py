"""Fixtures of the worker's tests."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workshop import Plant, plant


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
async def plane() -> AsyncIterator[Plant]:
    async with plant() as made:
        yield made
