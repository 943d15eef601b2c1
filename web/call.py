"""One caller's request, from admission to its one end.

Whatever happens (an answer, an error, a caller who leaves, an operator's cancel, a stop of this process), `Call.run`
leaves exactly one end behind: an event that the decider wrote by itself, or one `End` from here.
"""

import asyncio
import time
from functools import partial
from typing import Final, Literal

import msgspec
import structlog

from controlplane import ids
from controlplane.answer import Answer, Done, Queued, Routed
from controlplane.commands import Admit, End, Interrupt
from controlplane.envelope import Recorded
from controlplane.events import RequestCancelled, RequestFailed, RequestFinished, RequestQueued, RequestRouted
from controlplane.fleet import Request
from controlplane.refusal import Code, Refused
from web.attempt import Ask, Attempt, Lost, Sink
from web.errors import ApiError
from web.frontend import Finish
from web.gateway import Gateway
from web.plane_view import Ending, Watch
from web.views.standing import climb_progress, told

_log = structlog.get_logger(__name__)

ABORT_S: Final = 1.0
QUEUE_S: Final = 3600.0
"""Far above any queue deadline of the decider, which is the one that counts: a backstop."""
NOT_UP_RETRY_MS: Final = 1000


class Call:
    """Attributes: request (its id)."""

    def __init__(self, gateway: Gateway, ask: Ask) -> None:
        self.request = ids.new(ids.REQUEST)
        self._gateway, self._ask = gateway, ask
        self._attempt: Attempt | None = None
        self._tried = 0
        """Number of the last attempt."""
        self._ended = False
        self._stop: ApiError | None = None
        self._failing = False
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
            if (stop := self._stop) is not None:
                if self._failing:
                    self._end("failed", code=stop.code, message=stop.message)
                else:
                    self._end("cancelled", by="gateway")
                raise stop from None
            _log.exception("call_failed", request=self.request)
            self._end("failed", code="internal", message=f"{type(error).__name__} in the web process; its log says more")
            raise ApiError.ended("internal", "the web process failed; its log says more") from error
        finally:
            self._scope = None
            self._end("failed", code="internal", message="left without an end")

    def fail(self, error: ApiError) -> None:
        """Leave at the next step: the request has failed with `error`. One that is leaving already isn't told again."""
        if self._stop is None:
            self._failing = True
            self.stop(error)

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
            case RequestCancelled(by="gateway"):  # that is us: we were taken for dead
                message = f"request {self.request} was given up: the plane heard nothing of this web process; send it again"
                error = ApiError.ended("request_lost", message)
            case RequestCancelled(by=by):
                error = ApiError.ended("cancelled", f"request {self.request} was cancelled by the {by}")
            case RequestFinished() | None:
                error = ApiError.ended("request_lost", f"request {self.request} has ended while this process was cut off")
        self.stop(error)

    async def _live(self, watch: Watch, sink: Sink) -> Finish:
        answer = await self._admit()
        while True:
            routed = answer if isinstance(answer, Routed) else await self._wait(answer, watch, sink)
            self._tried = routed.attempt
            self._attempt = Attempt(self._gateway.frontends, routed, self._ask, partial(self._endpoint, routed.instance))
            try:
                finish = await self._attempt.run(sink)
            except Lost as lost:
                self._attempt.over = True
                answer = await self._interrupt(lost, self._attempt, sink)
            else:
                self._end("finished", finish_reason=finish.finish_reason)
                return finish

    async def _admit(self) -> Answer:
        ask = self._ask

        def make(gateway: str) -> Admit:
            return Admit(
                request=self.request, model=ask.model, gateway=gateway, kind=ask.kind, streamed=ask.streamed,
                prompt_bytes=ask.prompt_bytes, max_tokens=ask.max_tokens, body_sha256=ask.body_sha256,
                wait=ask.patience_s != 0,
            )  # fmt: skip

        try:
            return await self._gateway.admit(make)
        except Refused as refused:
            if refused.code is not Code.UNAVAILABLE:
                self._ended = True  # never accepted: there is nothing to end
            if refused.code is Code.BUSY:  # a caller who won't wait: later is another matter
                raise ApiError(503, refused.code, refused.message, retry_after_ms=refused.retry_after_ms) from refused
            raise ApiError.of(refused) from refused

    async def _wait(self, answer: Answer, watch: Watch, sink: Sink) -> Routed:
        if not isinstance(answer, Queued):
            raise ApiError.ended("internal", f"the decider answered {answer!r} to an admission")
        reason, place = answer.reason, answer.place
        now, most_s = time.monotonic(), self._ask.patience_s or QUEUE_S
        until, due, said = now + most_s, now + sink.hold_s, False
        while True:
            try:
                async with asyncio.timeout(min(due, until) - time.monotonic()):
                    item = await watch.next()
            except TimeoutError:
                if time.monotonic() >= until:
                    message = f"still queued after {most_s:g} s: {reason}"
                    raise ApiError.ended("queue_timeout", message, retry_after_ms=NOT_UP_RETRY_MS) from None
                said, due = True, time.monotonic() + (sink.keepalive_s or QUEUE_S)
                await sink.waiting(*self._standing(reason, place))
                continue
            match item:
                case Request():
                    if (routed := self._routed_now(item)) is not None:
                        return routed
                case Recorded(event=RequestQueued() as queued) if item.position > answer.position:
                    reason, place = queued.reason, queued.place
                    if said:
                        await sink.waiting(reason, place)
                case Recorded(event=RequestRouted() as event) if event.attempt > self._tried:
                    return Routed(
                        position=item.position, request=event.request, instance=event.instance, node=event.runs_on,
                        endpoint=event.endpoint, grant=event.grant, attempt=event.attempt, model=event.model,
                    )  # fmt: skip
                case _:
                    continue

    def _standing(self, reason: str, place: int) -> tuple[str, int]:
        """Why it waits, with how far the climb is where a node tells, and its place now."""
        view = self._gateway.view
        known = view.fleet.requests.get(self.request)
        far = climb_progress(view.fleet, view.beats, known.model) if known is not None else None
        return f"{reason}; {told(far)}" if far is not None else reason, view.place(self.request) or place

    def _endpoint(self, instance: str) -> str | None:
        known = self._gateway.view.fleet.instances.get(instance)
        return known.endpoint if known is not None else None

    def _routed_now(self, known: Request) -> Routed | None:
        """Where a state (not an event) says that the request runs."""
        fleet = self._gateway.view.fleet
        instance = fleet.instances.get(known.instance or "")
        if instance is None or instance.endpoint is None or known.grant is None or known.attempts <= self._tried:
            return None
        return Routed(
            position=fleet.position, request=known.request, instance=instance.instance, node=instance.node,
            endpoint=instance.endpoint, grant=known.grant, attempt=known.attempts, model=known.model,
        )  # fmt: skip

    async def _interrupt(self, lost: Lost, attempt: Attempt, sink: Sink) -> Answer:
        """Have a request whose instance is gone queued again, or failed; a caller who won't wait is told at once."""
        if self._ask.patience_s == 0:
            message = f"{lost.message}; the model has to come up again, and the caller won't wait"
            raise ApiError(503, lost.code, message, retry_after_ms=NOT_UP_RETRY_MS)
        report = Interrupt(
            request=self.request, attempt=attempt.routed.attempt, sent_chars=attempt.chars if sink.sends else 0, code=lost.code,
            message=lost.message, prompt_tokens=attempt.prompt_tokens, completion_tokens=attempt.completion_tokens,
        )  # fmt: skip
        try:
            answer = await self._gateway.interrupt(report)
        except Refused as refused:
            self._ended = self._ended or refused.code is Code.REQUEST_UNKNOWN
            raise ApiError.ended(lost.code, lost.message) from refused
        if isinstance(answer, Done) and (answer.position or self.request not in self._gateway.view.fleet.requests):
            self._ended = True  # the decider has failed it
            raise ApiError.ended(lost.code, lost.message)
        sink.restarted()
        if isinstance(answer, Done):  # the decider knew already, and has queued it by itself
            return Queued(position=0, request=self.request, code=lost.code, reason=lost.message, place=1)
        return answer

    def _end(
        self, outcome: Literal["finished", "failed", "cancelled"], *, code: str = "", message: str = "",
        by: Literal["caller", "operator", "gateway"] = "caller", finish_reason: str = "",
    ) -> None:  # fmt: skip
        """Leave one end behind, unless there is one; a generation that may still run is aborted first."""
        attempt, self._attempt = self._attempt, None
        end = None
        if not self._ended:
            self._ended = True
            end = End(
                request=self.request, outcome=outcome, finish_reason=finish_reason, code=code, message=message, by=by,
                prompt_tokens=attempt.prompt_tokens if attempt else 0,
                completion_tokens=attempt.completion_tokens if attempt else 0,
                first_token_at_ms=attempt.first_token_at_ms if attempt else None,
            )  # fmt: skip
        if attempt is not None and not attempt.over:
            self._gateway.spawn(self.request, self._abort(attempt.routed, end))
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
