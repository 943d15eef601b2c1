"""The SSE stream of the live page, as a bare ASGI handler: per frame and reader there is one `send` of shared bytes."""

import asyncio
from time import monotonic
from urllib.parse import parse_qs

from litestar.types import Receive, Scope, Send

from web.live.hub import Hub

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
    (b"x-content-type-options", b"nosniff"),
]


async def stream(hub: Hub, scope: Scope, receive: Receive, send: Send) -> None:
    """Send frames until the reader goes or the hub closes.

    The page says in `?from=` which frame it was drawn from; a reconnecting one in `Last-Event-ID`. An unknown one gets all.
    """
    if hub.closed:
        gone_away = [(b"retry-after", b"1"), (b"content-length", b"0"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 503, "headers": gone_away})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return
    headers = dict(scope["headers"])
    asked = parse_qs(scope["query_string"].decode("latin-1"))
    mark = headers.get(b"last-event-id", b"").decode("latin-1") or asked.get("from", [""])[0]
    reader = hub.join(mark)
    gone = asyncio.create_task(_until_gone(receive, hub, reader.task))
    try:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": b"retry: 500\n\n", "more_body": True})
        while (data := await hub.next(reader)) is not None:
            reader.sending_since = monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            reader.sending_since = 0.0
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    except asyncio.CancelledError:
        # Cut by the hub (stuck or closing) or by its own reader's going; any other cancellation is not ours to swallow.
        if not (hub.closed or gone.done() or reader.sending_since):
            raise
    finally:
        hub.leave(reader)
        gone.cancel()


async def _until_gone(receive: Receive, hub: Hub, task: "asyncio.Task[object] | None") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    if task is not None and not hub.closed:
        task.cancel()
