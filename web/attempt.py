"""One attempt of a request at one instance's frontend: its stream, taken up again where a connection broke off."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, Literal, Protocol

import msgspec
from msgspec.structs import replace

from controlplane.answer import Routed
from web.errors import ApiError
from web.frontend import Broken, Delta, Fault, Finish, Frontends, Line, Rejected, Start

REATTACH_S: Final = 5.0
"""A frontend that was killed is back within a second or two; after this its instance is given up."""
LONGEST_TRY_S: Final = 1.5
"""A try that took longer was no try: we stood still."""
REATTACH_PAUSE_S: Final = 0.05
CALLERS_FAULTS: Final = frozenset({"too_long", "invalid"})
"""Ends of a stream for which another instance would be no better."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wants, checked."""

    model: str
    kind: Literal["chat", "completion"]
    streamed: bool
    body: bytes
    """As received."""
    prompt_bytes: int
    max_tokens: int | None
    body_sha256: str
    patience_s: float | None = None
    """How long the caller waits for a model that is not up; 0: not at all. None: as long as the plane lets requests wait."""


class Sink(Protocol):
    """Where a call's output goes."""

    keepalive_s: float | None
    """How often a waiting caller is told so; None: not at all."""
    hold_s: float
    """How long nothing is said to a caller who waits: what fails before then fails with a status of its own."""
    sends: bool
    """Whether text reaches the caller before the end (then a lost instance can't be made good any more)."""

    async def waiting(self, reason: str, place: int) -> None: ...

    async def started(self) -> None: ...

    async def text(self, text: str) -> None: ...

    def restarted(self) -> None:
        """The text so far is void (never called once text was sent)."""
        ...


class Lost(Exception):
    """The instance, or the way to it, is gone. `code` and the message say how."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Attempt:
    """Attributes: prompt_tokens, completion_tokens (so far), chars (received), first_token_at_ms, over (nothing runs now)."""

    def __init__(self, frontends: Frontends, routed: Routed, ask: Ask, endpoint: Callable[[], str | None]) -> None:
        """`endpoint` says where the instance's frontend is now: one that was restarted may listen elsewhere."""
        self._frontends, self.routed, self._ask, self._endpoint = frontends, routed, ask, endpoint
        self.prompt_tokens = self.completion_tokens = self.chars = 0
        self.first_token_at_ms: int | None = None
        self.over = False

    async def run(self, sink: Sink) -> Finish:
        """Stream to `sink`. Raises Lost, or ApiError when the request itself is at fault."""
        attached, left_s, last = False, REATTACH_S, 0.0
        while True:
            if attached:
                stream = self._frontends.reattach(self.routed, self.chars)
            else:
                stream = self._frontends.generate(self.routed, self._ask.kind, self._ask.body)
            try:
                async with aclosing(stream):
                    async for batch in stream:
                        attached, left_s, last = True, REATTACH_S, 0.0
                        if (finish := await self._take(batch, sink)) is not None:
                            return finish
                raise Broken("the frontend's stream ended early")
            except Rejected as rejected:
                if rejected.code != "request_exists":
                    raise self._refusal(rejected) from rejected
                attached = True
            except Broken as broken:
                now = time.monotonic()
                left_s -= min(now - (last or now), LONGEST_TRY_S)
                last = now
                if left_s < 0:
                    raise Lost("frontend_lost", f"the frontend at {self.routed.endpoint} is gone: {broken}") from broken
                await asyncio.sleep(REATTACH_PAUSE_S)
                self.routed = replace(self.routed, endpoint=self._endpoint() or self.routed.endpoint)

    async def _take(self, batch: list[Line], sink: Sink) -> Finish | None:
        """Pass on what one read brought; its text in one piece."""
        text, finish, fault = "", None, None
        for line in batch:
            match line:
                case Delta():
                    text += line.text
                    self.completion_tokens = line.tokens
                case Start():
                    self.prompt_tokens = line.prompt_tokens
                    await sink.started()
                case Finish():
                    self.prompt_tokens, self.completion_tokens = line.prompt_tokens, line.completion_tokens
                    finish = line
                    self.over = True
                case Fault():
                    fault = line
                    self.over = True
        if text:
            if self.first_token_at_ms is None:
                self.first_token_at_ms = time.time_ns() // 1_000_000
            self.chars += len(text)
            await sink.text(text)
        if fault is not None:
            if fault.code in CALLERS_FAULTS:
                raise ApiError.ended(fault.code, fault.message)
            raise Lost(fault.code, fault.message)
        return finish

    def _refusal(self, rejected: Rejected) -> Exception:
        self.over = True
        if rejected.status == 400:
            return ApiError(400, rejected.code, rejected.message, param=rejected.param)
        return Lost(rejected.code, rejected.message)
