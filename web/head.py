"""HEAD, as monitoring asks: what GET would answer, without the body. No route has to know of it."""

from typing import Any, Final

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

USED_UP: Final = frozenset({"/login"})
"""Whose GET changes something (a login link is good once): a look at the headers must not. They go on refusing HEAD, also
with slashes behind them, which routes don't mind."""


class Head:
    """ASGI middleware, before all that asks for the method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or scope["method"] != "HEAD" or scope["path"].rstrip("/") in USED_UP:
            await self._app(scope, receive, send)
            return
        got: Any = {**scope, "method": "GET"}  # a copy: the server itself has to know that no body may follow
        await self._app(got, receive, _without_body(send))


def _without_body(send: Send) -> Send:
    """Send the start, and the end with it: to a stream that is as if its reader had gone."""

    async def started(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return started
