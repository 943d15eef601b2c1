"""One frontend an instance, whatever becomes of the workers that start them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worker.frontend import server


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    (tmp_path / "run" / "inst" / "ins_1").mkdir(parents=True)
    return SimpleNamespace(data=str(tmp_path), node_address="127.0.0.1", node_token="t")


async def started(plane: Any) -> "asyncio.Task[None]":
    ready = asyncio.Event()
    serving = asyncio.create_task(server.serve(plane, "ins_1", 0, lambda port: ready.set()))
    async with asyncio.timeout(30):
        await ready.wait()
    return serving


async def test_one_whose_place_another_has_taken_leaves_and_harms_it_not(plane: Any) -> None:
    first = await started(plane)
    second = await started(plane)
    async with asyncio.timeout(30):
        await first
    sockets = Path(plane.data) / "run" / "inst" / "ins_1" / "tokens.sock"
    _, writer = await asyncio.open_unix_connection(str(sockets))
    writer.close()
    assert not second.done()
    sockets.unlink()  # the instance goes
    async with asyncio.timeout(30):
        await second
