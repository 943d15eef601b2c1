"""The holder's end of an engine's connection, when engines come and go."""

import asyncio
import socket
from pathlib import Path

import pytest

from worker.engineport import EnginePort, NotTold
from worker.engines.messages import ControlReply, Fault, Health
from worker.engines.wire import pack


async def connected(port: EnginePort, path: Path) -> socket.socket:
    engine = socket.socket(socket.AF_UNIX)
    engine.setblocking(False)
    async with asyncio.timeout(10):
        while True:
            try:
                await asyncio.get_running_loop().sock_connect(engine, str(path))
                break
            except OSError:
                await asyncio.sleep(0)
        while not port.connected:
            await asyncio.sleep(0)
    return engine


async def test_an_engine_follows_one_whose_socket_others_still_have(tmp_path: Path) -> None:
    """What a dead engine had forked may have it for a while; nobody hears an end from there."""
    port, path = EnginePort(), tmp_path / "control.sock"
    listening = asyncio.create_task(port.listen(path))
    first = await connected(port, path)
    telling = asyncio.create_task(port.tell(Health(), 30))
    await asyncio.get_running_loop().sock_recv(first, 1)
    port.lose("engine_died", "it is dead")
    with pytest.raises(NotTold, match="it is dead"):
        await telling
    assert not port.connected
    second = await connected(port, path)
    telling = asyncio.create_task(port.tell(Health(), 30))
    await asyncio.get_running_loop().sock_recv(second, 1)
    answer: ControlReply = Fault(code="busy", message="")
    second.send(pack(answer))
    assert await telling == answer
    listening.cancel()
    await asyncio.wait([listening])
    first.close()
    second.close()
