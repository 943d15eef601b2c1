"""A frontend's port is its own from the moment it was chosen."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from worker import processes, service
from worker.instancedir import InstanceDir
from worker.service import FrontendGone, Service


async def test_nobody_takes_the_port_while_the_frontend_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spawn(argv: list[str], **_: object) -> processes.Process:
        asked.append(int(argv[-1]))
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", asked[-1]))
        return processes.Process(1 << 23, 0, "")

    async def ended(*_: object, **__: object) -> bool:
        return True

    monkeypatch.setattr(service.processes, "spawn", spawn)
    monkeypatch.setattr(service.processes, "end", ended)
    directory = InstanceDir(tmp_path / "run" / "inst", "ins_1")
    directory.create("cfg_1")
    plane: Any = SimpleNamespace(node_address="127.0.0.1", data=str(tmp_path), node_token="t")
    with pytest.raises(FrontendGone):  # it has ended, in this test
        await Service(plane, cast(Any, Silent()), directory).start(0, deadline_s=30)
    record = directory.read()
    assert record is not None
    assert asked == [record.port]


async def test_a_port_that_somebody_has_taken_is_told_at_once(tmp_path: Path) -> None:
    plane: Any = SimpleNamespace(node_address="127.0.0.1", data=str(tmp_path), node_token="t")
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(FrontendGone, match=str(port)):
            await Service(plane, cast(Any, Silent()), InstanceDir(tmp_path, "ins_1")).start(port, deadline_s=30)


class Silent:
    async def call(self, *_: object, **__: object) -> tuple[int, bytes]:
        return 503, b""
