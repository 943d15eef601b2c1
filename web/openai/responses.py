"""What goes out for a call: a stream of events, or one body; and the watch on the caller, who may leave or lose his token."""

import asyncio
import difflib
from typing import Final

import structlog
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from web.attempt import Ask
from web.auth import Credential
from web.call import QUEUE_S, Call
from web.errors import ApiError
from web.gateway import Gateway
from web.openai.bodies import unknown_model
from web.openai.chunks import Chunks, comment, error_event, whole

_log = structlog.get_logger(__name__)

KEEPALIVE_S: Final = 2.0
"""Between comments to a waiting caller: proxies cut at 30 s and more, and a person sees the place and the load move."""
HOLD_S: Final = 1.0
"""A stream's 200 goes out with its first event or, while the caller waits, after this long: what fails sooner (a climb that
breaks off at once, a model that is retired) has its own status and Retry-After; a wake is over by then."""

Headers = list[tuple[bytes, bytes]]


class CallResponse(ASGIResponse):
    """Runs the call while the caller is there and may ask; who leaves cancels it, whose token is revoked has it failed."""

    def __init__(self, gateway: Gateway, ask: Ask, *, include_usage: bool = False) -> None:
        super().__init__()
        self._ask, self._gateway = ask, gateway
        self._call = Call(gateway, ask)
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._stream(send) if self._ask.streamed else self._whole(send))
        gone = asyncio.ensure_future(_gone(receive))
        credential: Credential = scope["auth"]
        try:
            if (error := await credential.outlasts(work, gone)) is not None:
                self._call.fail(error)
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _whole(self, send: Send) -> None:
        sink = _Whole()
        try:
            finish = await self._call.run(sink)
        except ApiError as error:
            await self._refuse(send, error)
        else:
            await self._send(send, 200, [], whole(self._call.request, self._ask, "".join(sink.pieces), finish))

    async def _stream(self, send: Send) -> None:
        sink = _Stream(send, Chunks(self._call.request, self._ask, self._include_usage), self._call.request)
        try:
            finish = await self._call.run(sink)
        except ApiError as error:
            if not sink.begun:
                await self._refuse(send, error)
            else:
                await sink.close(error_event(self._explained(error)))
        else:
            await sink.close(sink.chunks.closing(finish))

    async def _refuse(self, send: Send, error: ApiError) -> None:
        error = self._explained(error)
        await self._send(send, error.status, [(k.encode(), v.encode()) for k, v in error.headers.items()], error.openai())

    def _explained(self, error: ApiError) -> ApiError:
        """Add the nearest name to a 404."""
        if error.code not in ("model_unknown", "model_retired"):
            return error
        fleet = self._gateway.view.fleet
        names = [model.model for model in fleet.models.values() if not model.retired] + list(fleet.aliases)
        near = difflib.get_close_matches(self._ask.model, names, n=1)
        return unknown_model(self._ask.model, near[0] if near else None)

    async def _send(self, send: Send, status: int, headers: Headers, body: bytes) -> None:
        headers = [
            *headers, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self._call.request.encode()),
        ]  # fmt: skip
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _gone(receive: Receive) -> None:
    """Return once the caller's connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Whole:
    """Collects the text."""

    keepalive_s: float | None = None
    hold_s = QUEUE_S
    sends = False

    def __init__(self) -> None:
        self.pieces: list[str] = []

    async def waiting(self, reason: str, place: int) -> None:
        pass

    async def started(self) -> None:
        pass

    async def text(self, text: str) -> None:
        self.pieces.append(text)

    def restarted(self) -> None:
        self.pieces.clear()


class _Stream:
    """Sends events. The status goes out with the first of them: refusals and failures before that keep their own."""

    keepalive_s: float | None = KEEPALIVE_S
    hold_s = HOLD_S
    sends = True

    def __init__(self, send: Send, chunks: Chunks, request: str) -> None:
        self._send, self.chunks, self._request = send, chunks, request
        self.begun = self._opened = False

    async def waiting(self, reason: str, place: int) -> None:
        await self._body(comment(f"waiting, place {place}: {reason}"))

    async def started(self) -> None:
        if not self._opened:
            self._opened = True
            await self._body(self.chunks.opening())

    async def text(self, text: str) -> None:
        await self._body(self.chunks.text(text))

    def restarted(self) -> None:
        pass

    async def close(self, last: bytes) -> None:
        await self._begin()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _body(self, data: bytes) -> None:
        if not self.begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"), (b"x-request-id", self._request.encode()),
        ]  # fmt: skip
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
