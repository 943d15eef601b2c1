"""Fixtures of the worker's tests."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.imagehouse import SCRIPTED, Surgeon, able
from tests.workshop import QUICK, Plant, plant
from worker import namespaces
from worker.images import criu


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
async def plane() -> AsyncIterator[Plant]:
    async with plant() as made:
        yield made


@pytest.fixture
async def house(plane: Plant) -> Plant:
    return able(plane)


@pytest.fixture
async def shared(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plant]:
    """A node that is refused namespaces."""
    monkeypatch.setenv(namespaces.SWITCH, "off")
    async with plant() as made:
        yield able(made)


@pytest.fixture
async def surgeon(plane: Plant) -> Surgeon:
    return await _surgeon(plane)


@pytest.fixture
async def surgeon_of_shared(shared: Plant) -> Surgeon:
    return await _surgeon(shared)


async def _surgeon(plane: Plant) -> Surgeon:
    real = criu.find(plane.data)
    if real is None:
        pytest.skip("no CRIU is installed")
    place = plane.data / "criu" / "criu"
    place.parent.mkdir()
    place.write_text(SCRIPTED.format(flag=place.parent / "flag", real=real))
    place.chmod(0o700)
    plane.deadlines = msgspec.structs.replace(QUICK, restore=6.0, build=20.0)
    await plane.restart_worker()
    able(plane)
    return Surgeon(plane)
