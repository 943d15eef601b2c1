"""Requests as rows: the open ones from the state, the ended ones from the event that ended them."""

import msgspec

from controlplane.envelope import Recorded
from controlplane.events import RequestCancelled, RequestFailed, RequestFinished
from controlplane.fleet import Request

OUTCOMES = ("finished", "failed", "cancelled")


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    request: str
    model: str
    outcome: str
    """`running`, `queued`, `finished`, `failed` or `cancelled`; also the row's tone."""
    at_ms: int
    """When it was accepted."""
    kind: str
    streamed: bool
    reason: str
    """Finish reason, error code, phase of the cancellation, or why it waits."""
    message: str = ""
    instance: str | None = None
    attempts: int = 0
    queued_ms: int | None = None
    first_token_ms: int | None = None
    took_ms: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    position: int = 0
    """Of the event that ended it; 0 while it is open."""


def counted(event: RequestFinished | RequestFailed | RequestCancelled) -> bool:
    """Whether its tokens are known. An operator's cancellation, and the end of a gateway, come before anybody has counted."""
    return not isinstance(event, RequestCancelled) or event.by == "caller" or event.phase != "running"


def opened(request: Request) -> RequestRow:
    """An open request."""
    running = request.instance is not None
    queued = request.routed_ms - request.accepted_ms if running and request.routed_ms is not None else None
    return RequestRow(
        request=request.request, model=request.model, outcome="running" if running else "queued", at_ms=request.accepted_ms,
        kind=request.kind, streamed=request.streamed, reason="" if running else request.code, message=request.reason,
        instance=request.instance, attempts=request.attempts, queued_ms=queued,
    )  # fmt: skip


def ended(recorded: Recorded) -> RequestRow | None:
    """The row of an event that ends a request; None for any other event."""
    match recorded.event:
        case RequestFinished() as event:
            outcome, reason, message = "finished", event.finish_reason, ""
        case RequestFailed() as event:
            outcome, reason, message = "failed", event.code, event.message
        case RequestCancelled() as event:
            outcome, reason, message = "cancelled", f"by {event.by}", f"while {event.phase}"
        case _:
            return None
    known = counted(event)
    return RequestRow(
        request=event.request, model=event.model, outcome=outcome, at_ms=event.accepted_ms, kind=event.kind,
        streamed=event.streamed, reason=reason, message=message, instance=event.instance, attempts=event.attempts,
        queued_ms=event.queued_ms, first_token_ms=event.first_token_ms, took_ms=event.took_ms,
        prompt_tokens=event.prompt_tokens if known else None, completion_tokens=event.completion_tokens if known else None,
        position=recorded.position,
    )  # fmt: skip
