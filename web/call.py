"""One caller's request, from admission to its one end.

Whatever happens (an answer, an error, a caller who leaves, an operator's cancel, a stop of this process), `Call.run`
leaves exactly one end behind: an event that the decider wrote by itself, or one `End` from here.
"""

import asyncio
import time
from contextlib import aclosing
from typing import Final, Literal, Protocol

import msgspec
import structlog

from controlplane import ids
from controlplane.answer import Answer, Queued, Routed
from controlplane.commands import Admit, End, Interrupt
from controlplane.envelope import Recorded
from controlplane.events import RequestCancelled, RequestFailed, RequestFinished, RequestQueued, RequestRouted
from controlplane.fleet import Request
from controlplane.refusal import Code, Refused
from web.errors import ApiError
from web.frontend import Broken, Delta, Fault, Finish, Line, Rejected, Start
from web.gateway import Gateway
from web.plane_view import Ending, Watch

_log = structlog.get_logger(__name__)

REATTACH_S: Final = 5.0
"""A frontend that was killed is back within a second or two; after this its instance is given up."""
REATTACH_PAUSE_S: Final = 0.05
ABORT_S: Final = 1.0
QUEUE_S: Final = 3600.0
"""Far above any queue deadline of the decider, which is the one that counts: a backstop."""


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


class Sink(Protocol):
    """Where a call's output goes."""

    keepalive_s: float | None
    """How often a waiting caller is told so; None: not at all."""
    sends: bool
    """Whether text reaches the caller before the end (then a lost instance can't be made good any more)."""

    async def waiting(self, reason: str, place: int) -> None: ...

    async def started(self) -> None: ...

    async def text(self, text: str) -> None: ...

    def restarted(self) -> None:
        """The text so far is void (never called once text was sent)."""
        ...


class _Lost(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Call:
    """Attributes: request (its id), prompt_tokens, completion_tokens (so far), first_token_at_ms."""

    def __init__(self, gateway: Gateway, ask: Ask) -> None:
        self.request = ids.new(ids.REQUEST)
        self._gateway, self._ask = gateway, ask
        self.prompt_tokens = self.completion_tokens = 0
        self.first_token_at_ms: int | None = None
        self._chars = 0
        self._routed: Routed | None = None
        """Set while the request may be running in an engine."""
        self._ended = False
        self._stop: ApiError | None = None
        self._scope: asyncio.Timeout | None = None

    async def run(self, sink: Sink) -> Finish:
        """Carry the request out. Raises ApiError; when cancelled, the request is cancelled by its caller."""
        try:
            async with asyncio.timeout(None) as self._scope:
                with self._gateway.holding(self), self._gateway.view.watching(self.request, self._over) as watch:
                    return await self._live(watch, sink)
        except ApiError as error:
            self._end("failed", code=error.code, message=error.message)
            raise
        except asyncio.CancelledError:
            self._end("cancelled", by="caller")
            raise
        except Exception as error:
            if self._stop is not None:
                self._end("cancelled", by="gateway")
                raise self._stop from None
            _log.exception("call_failed", request=self.request)
            self._end("failed", code="internal", message=f"{type(error).__name__} in the web process; its log says more")
            raise ApiError.ended("internal", "the web process failed; its log says more") from error
        finally:
            self._end("failed", code="internal", message="left without an end")

    def stop(self, error: ApiError) -> None:
        """Leave at the next step, with `error` for the caller."""
        if self._stop is None and self._scope is not None:
            self._stop = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    def _over(self, ending: Ending | None) -> None:
        """The log says that the request has ended, and it wasn't us."""
        if self._ended:
            return
        self._ended = True
        match ending:
            case RequestFailed(code=code, message=message):
                error = ApiError.ended(code, message)
            case RequestCancelled(by=by):
                error = ApiError.ended("cancelled", f"request {self.request} was cancelled by the {by}")
            case RequestFinished() | None:
                error = ApiError.ended("request_lost", f"request {self.request} has ended while this process was cut off")
        self.stop(error)

    async def _live(self, watch: Watch, sink: Sink) -> Finish:
        answer = await self._admit()
        while True:
            routed = answer if isinstance(answer, Routed) else await self._wait(answer, watch, sink)
            self._routed = routed
            try:
                finish = await self._stream(routed, sink)
            except _Lost as lost:
                self._routed = None
                answer = await self._interrupt(lost, routed, sink)
            else:
                self._routed = None
                self.prompt_tokens, self.completion_tokens = finish.prompt_tokens, finish.completion_tokens
                self._end("finished", finish_reason=finish.finish_reason)
                return finish

    async def _admit(self) -> Answer:
        ask = self._ask

        def make(gateway: str) -> Admit:
            return Admit(
                request=self.request, model=ask.model, gateway=gateway, kind=ask.kind, streamed=ask.streamed,
                prompt_bytes=ask.prompt_bytes, max_tokens=ask.max_tokens, body_sha256=ask.body_sha256,
            )  # fmt: skip

        try:
            return await self._gateway.admit(make)
        except Refused as refused:
            if refused.code is not Code.UNAVAILABLE:
                self._ended = True  # never accepted: there is nothing to end
            raise ApiError.of(refused) from refused

    async def _wait(self, answer: Answer, watch: Watch, sink: Sink) -> Routed:
        if not isinstance(answer, Queued):
            raise ApiError.ended("internal", f"the decider answered {answer!r} to an admission")
        reason, place = answer.reason, answer.place
        until = time.monotonic() + QUEUE_S
        await sink.waiting(reason, place)
        while True:
            try:
                async with asyncio.timeout(sink.keepalive_s or QUEUE_S):
                    item = await watch.next()
            except TimeoutError:
                if time.monotonic() > until:
                    raise ApiError.ended("queue_timeout", f"still queued after {QUEUE_S:.0f} s: {reason}") from None
                await sink.waiting(reason, self._gateway.view.place(self.request) or place)
                continue
            match item:
                case Request():
                    if (routed := self._routed_now(item)) is not None:
                        return routed
                case Recorded(position=position) if position <= answer.position:
                    continue
                case Recorded(event=RequestQueued() as queued):
                    reason, place = queued.reason, queued.place
                    await sink.waiting(reason, place)
                case Recorded(event=RequestRouted() as event):
                    return Routed(
                        position=item.position, request=event.request, instance=event.instance, node=event.runs_on,
                        endpoint=event.endpoint, grant=event.grant, attempt=event.attempt, model=event.model,
                    )  # fmt: skip
                case _:
                    continue

    def _routed_now(self, known: Request) -> Routed | None:
        """Where a state (not an event) says that the request runs."""
        fleet = self._gateway.view.fleet
        instance = fleet.instances.get(known.instance or "")
        if instance is None or instance.endpoint is None or known.grant is None:
            return None
        return Routed(
            position=fleet.position, request=known.request, instance=instance.instance, node=instance.node,
            endpoint=instance.endpoint, grant=known.grant, attempt=known.attempts, model=known.model,
        )  # fmt: skip

    async def _stream(self, routed: Routed, sink: Sink) -> Finish:
        frontends = self._gateway.frontends
        attached, give_up_at = False, 0.0
        while True:
            lines = (
                frontends.reattach(routed, self._chars)
                if attached
                else frontends.generate(routed, self._ask.kind, self._ask.body)
            )
            try:
                async with aclosing(lines):
                    async for batch in lines:
                        attached, give_up_at = True, 0.0
                        if (finish := await self._take(batch, sink)) is not None:
                            return finish
                raise Broken("the frontend's stream ended early")
            except Rejected as rejected:
                if rejected.code != "request_exists":
                    raise self._rejected(rejected) from rejected
                attached = True
            except Broken as broken:
                now = time.monotonic()
                give_up_at = give_up_at or now + REATTACH_S
                if now > give_up_at:
                    raise _Lost("frontend_lost", f"the frontend at {routed.endpoint} is gone: {broken}") from broken
                await asyncio.sleep(REATTACH_PAUSE_S)

    async def _take(self, batch: list[Line], sink: Sink) -> Finish | None:
        """Pass on what one read brought; text in one piece."""
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
                    finish = line
                case Fault():
                    fault = line
        if text:
            if self.first_token_at_ms is None:
                self.first_token_at_ms = time.time_ns() // 1_000_000
            self._chars += len(text)
            await sink.text(text)
        if fault is not None:
            if fault.code in ("too_long", "invalid", "aborted"):
                self._routed = None
                raise ApiError.ended(fault.code, fault.message)
            raise _Lost(fault.code, fault.message)
        return finish

    def _rejected(self, rejected: Rejected) -> Exception:
        if rejected.status == 400:
            self._routed = None
            return ApiError(400, rejected.code, rejected.message, param=rejected.param)
        return _Lost(rejected.code, rejected.message)

    async def _interrupt(self, lost: _Lost, routed: Routed, sink: Sink) -> Answer:
        """Have a request whose instance is gone queued again, or failed."""
        sent = self._chars if sink.sends else 0
        try:
            answer = await self._gateway.interrupt(
                Interrupt(
                    request=self.request,
                    attempt=routed.attempt,
                    sent_chars=sent,
                    code=lost.code,
                    message=lost.message,
                    prompt_tokens=self.prompt_tokens,
                    completion_tokens=self.completion_tokens,
                )  # fmt: skip
            )
        except Refused as refused:
            if refused.code is not Code.UNAVAILABLE:
                self._ended = self._ended or refused.code is Code.REQUEST_UNKNOWN
            raise ApiError.ended(lost.code, lost.message) from refused
        if not isinstance(answer, Routed | Queued):
            self._ended = True  # the decider has failed it
            raise ApiError.ended(lost.code, lost.message)
        self._chars = self.completion_tokens = 0
        self.first_token_at_ms = None
        sink.restarted()
        return answer

    def _end(
        self, outcome: Literal["finished", "failed", "cancelled"], *, code: str = "", message: str = "",
        by: Literal["caller", "operator", "gateway"] = "caller", finish_reason: str = "",
    ) -> None:  # fmt: skip
        routed, self._routed = self._routed, None
        end = None if self._ended else End(
            request=self.request, outcome=outcome, finish_reason=finish_reason, code=code, message=message, by=by,
            prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens,
            first_token_at_ms=self.first_token_at_ms,
        )  # fmt: skip
        self._ended = True
        if routed is not None:
            self._gateway.spawn(self._abort(routed, end))
        elif end is not None:
            self._gateway.ends.add(end)

    async def _abort(self, routed: Routed, end: End | None) -> None:
        """Stop the engine's work, then end the request with the tokens that it cost."""
        tokens: int | None = None
        try:
            tokens = await self._gateway.frontends.abort(routed.endpoint, routed.request, ABORT_S)
        finally:
            if end is not None:
                self._gateway.ends.add(msgspec.structs.replace(end, completion_tokens=tokens or end.completion_tokens))
