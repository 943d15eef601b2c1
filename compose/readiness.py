"""Whether a web process says that it is ready: one GET, without an HTTP library (`up` asks it fifty times a second)."""

import asyncio
import contextlib
from typing import Final

ANSWER_S: Final = 2.0


async def answers(host: str, port: int, path: str, *, deadline_s: float = ANSWER_S) -> bool:
    """Whether GET `path` there answers 200 in time."""
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                name = f"[{host}]" if ":" in host else host
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n".encode())
                status = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError):
        return False
    return status.split(b" ")[1:2] == [b"200"]
