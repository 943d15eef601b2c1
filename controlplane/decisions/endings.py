"""How requests end: the event that ends one holds all that a row of the request log shows."""

from typing import Any

from controlplane import ids
from controlplane.commands import End
from controlplane.decisions.draft import Draft
from controlplane.events import RequestCancelled, RequestFailed, RequestFinished
from controlplane.fleet.callers import Request


def request_operation(request: str) -> str:
    """The operation that ties together what is done for one request."""
    return ids.derived(ids.OPERATION, request)


def end(draft: Draft, request: Request, report: End) -> None:
    """As its gateway saw it."""
    row = _row(draft, request, report.prompt_tokens, report.completion_tokens, report.first_token_at_ms)
    match report.outcome:
        case "finished":
            draft.emit(
                RequestFinished(finish_reason=report.finish_reason or "stop", **row),
                operation=request_operation(request.request),
            )
        case "failed":
            draft.emit(
                RequestFailed(code=report.code or "failed", message=report.message, **row),
                operation=request_operation(request.request),
            )
        case "cancelled":
            draft.emit(
                RequestCancelled(by=report.by, phase=phase(request), **row), operation=request_operation(request.request)
            )


def fail(draft: Draft, request: Request, code: str, message: str, *, prompt: int = 0, completion: int = 0) -> None:
    """`prompt`, `completion`: tokens."""
    row = _row(draft, request, prompt, completion)
    draft.emit(RequestFailed(code=code, message=message, **row), operation=request_operation(request.request))


def cancel(draft: Draft, request: Request, by: str) -> None:
    row = _row(draft, request)
    draft.emit(RequestCancelled(by=by, phase=phase(request), **row), operation=request_operation(request.request))


def fail_waiting(draft: Draft, model: str, code: str, message: str) -> None:
    """End all that wait for the model."""
    for request in draft.fleet.waiting.get(model, ()):
        fail(draft, draft.fleet.requests[request], code, message)


def phase(request: Request) -> str:
    """`running`, `climbing` or `queued`."""
    if request.instance is not None:
        return "running"
    return "climbing" if request.code == "climbing" else "queued"


def _row(draft: Draft, request: Request, prompt: int = 0, completion: int = 0, first_at: int | None = None) -> dict[str, Any]:
    accepted = request.accepted_ms
    return {
        "request": request.request,
        "model": request.model,
        "kind": request.kind,
        "streamed": request.streamed,
        "accepted_ms": accepted,
        "instance": request.instance,
        "attempts": request.attempts,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "queued_ms": (request.routed_ms or draft.now) - accepted,
        "first_token_ms": None if first_at is None else first_at - accepted,
        "took_ms": draft.now - accepted,
    }
