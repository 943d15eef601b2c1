"""The worker's process: its start and its end."""

import asyncio
import signal
import sys
from pathlib import Path

from controlplane.plane import Plane


async def test_a_worker_that_is_told_to_leave_before_it_has_found_its_bus_leaves_at_once(tmp_path: Path) -> None:
    connected, left = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as bus:
        url = f"nats://127.0.0.1:{bus.sockets[0].getsockname()[1]}"
        Plane(data=str(tmp_path), postgres_url="", nats_url=url).write()
        worker = await asyncio.create_subprocess_exec(sys.executable, "-m", "worker.agent", "--data", str(tmp_path))
        async with asyncio.timeout(60):
            await connected.wait()
        worker.send_signal(signal.SIGTERM)
        async with asyncio.timeout(40):
            assert await worker.wait() == 0
            await left.wait()
