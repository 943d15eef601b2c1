"""What is waited for before anybody is told that a plane is ready."""

import asyncio

from compose.attendance import shown
from controlplane.plane import Plane


async def test_ready_is_said_once_web_has_seen_the_models_of_the_settings() -> None:
    """It may lag behind the decider: who asked for one of them at once would have heard that there is none."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 %s\r\n\r\n" % (b"200 OK" if len(asked) == 3 else b"503 Service Unavailable"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as web:
        host, port = web.sockets[0].getsockname()[:2]
        async with asyncio.timeout(20):
            await shown(Plane(data="", postgres_url="", nats_url="", web_host=host, web_port=port), 17)
    assert [line.split()[1] for line in asked] == [b"/readyz?after=17"] * 3
