"""Requests: in, lost, cancelled, ended."""

from difflib import get_close_matches
from typing import Final

from controlplane import unopened
from controlplane.commands import Admit, CancelRequest, EndRequests, Interrupt
from controlplane.decisions import endings, foreign, standing
from controlplane.decisions.draft import Draft
from controlplane.decisions.endings import request_operation
from controlplane.decisions.limits import ATTEMPTS, INSPECTION_MS, QUEUE_LIMIT
from controlplane.decisions.needs import cannot_fit, refusal_code
from controlplane.decisions.schedule import advance, bound_passed, climbs, route
from controlplane.decisions.waits import Wait
from controlplane.events import RequestAccepted, RequestInterrupted, RequestQueued
from controlplane.fleet.members import Model
from controlplane.fleet.state import Fleet
from controlplane.refusal import Code, Refused

NAMED: Final = 8
"""Models that are named to who asks for one that there is not; of more, their number is told."""
SHOWN: Final = 100
"""Characters of a name that there is not which are said again: as many as a name may have."""


def admit(draft: Draft, command: Admit) -> None:
    """Accept a request, and route or queue it.

    1. A model that is `up` takes it at once, unless somebody has waited past the bound (then the planner decides).
    2. What can't be served is refused. 3. It joins those who wait for the model, or its
       climb. 4. The planner finds it a place, or says why it waits.
    """
    fleet = draft.fleet
    if command.gateway not in fleet.gateways:
        raise Refused(Code.GATEWAY_UNKNOWN, f"gateway {command.gateway} is not open; it has to announce itself first")
    if command.request in fleet.requests:
        raise Refused(Code.REQUEST_EXISTS, f"request {command.request} is being served already", request=command.request)
    model = known(fleet, command.model)
    past_bound = bound_passed(fleet, draft.now)
    instance = standing.serving(fleet, model)
    if instance is not None and not past_bound:
        _accept(draft, command, model)
        route(draft, draft.fleet.requests[command.request], instance)
        return
    if instance is None:
        check_servable(fleet, model, draft.now)
    if not command.wait and instance is None:
        raise _busy(fleet, model)
    if len(fleet.waiting.get(model.model, ())) >= QUEUE_LIMIT:
        message = f"{QUEUE_LIMIT} requests wait for {model.model} already; try again later"
        raise Refused(Code.QUEUE_FULL, message, retry_after_ms=5000, limit=QUEUE_LIMIT)
    joined = _joined(fleet, model, up=instance is not None)
    _accept(draft, command, model)
    if joined is None:
        advance(draft)
        if not command.wait and draft.fleet.requests[command.request].instance is None:
            raise _busy(fleet, model)  # the draft, and all that is in it, is dropped
        return
    if not command.wait:
        raise _busy(fleet, model)
    place = sum(len(waiting) for waiting in draft.fleet.waiting.values())
    draft.emit(
        RequestQueued(request=command.request, model=model.model, code=joined.code, reason=joined.reason, place=place),
        operation=request_operation(command.request),
    )


def _busy(fleet: Fleet, model: Model) -> Refused:
    why = foreign.hindrance(fleet, model)
    message = f"{model.model} can't run at once, and the caller won't wait{f': {why}' if why else ''}"
    return Refused(Code.BUSY, message, retry_after_ms=1000)


def _joined(fleet: Fleet, model: Model, *, up: bool) -> Wait | None:
    """What a newcomer waits for who changes nothing: those before it wait for that, or the model climbs anyway.

    So a thousandth request costs what the second did. What time brings about is for the next tick.
    """
    waiting = fleet.waiting.get(model.model)
    if waiting:
        last = fleet.requests[waiting[-1]]
        return Wait(last.code, last.reason) if last.code not in ("", "reopened") else None
    climbing = None if up else standing.climbing(fleet, model)
    return climbs(fleet, climbing, model) if climbing else None


def _accept(draft: Draft, command: Admit, model: Model) -> None:
    draft.emit(
        RequestAccepted(
            request=command.request, model=model.model, gateway=command.gateway, kind=command.kind, streamed=command.streamed,
            prompt_bytes=command.prompt_bytes, max_tokens=command.max_tokens, body_sha256=command.body_sha256,
        ),
        operation=request_operation(command.request),
    )  # fmt: skip


def known(fleet: Fleet, name: str) -> Model:
    """The model of that name or alias. Raises Refused when there is none, with the nearest name, or when it is retired."""
    model = fleet.resolve(name)
    if model is None:
        names = [m.model for m in fleet.models.values() if not m.retired] + list(fleet.aliases)
        near = get_close_matches(name, names, 1, 0.5)
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        listed = f"known: {', '.join(sorted(names)[:NAMED])}{more}" if names else "there is none yet"
        hint = f"did you mean {near[0]}?" if near else listed
        raise Refused(
            Code.MODEL_UNKNOWN, f"no model is called {name[:SHOWN]!r}; {hint}", model=name[:SHOWN],
            did_you_mean=near[0] if near else None,
        )  # fmt: skip
    if model.retired:
        raise Refused(Code.MODEL_RETIRED, f"{model.model} has been retired", model=model.model)
    return model


def check_servable(fleet: Fleet, model: Model, now: int) -> None:
    """Raise Refused when waiting for the model would be in vain, or its last start has just failed."""
    name = model.model
    if model.rejection is not None:
        numbers = {"need_bytes": model.rejection.need_bytes, "limit_bytes": model.rejection.limit_bytes}
        raise Refused(refusal_code(model.rejection.code), model.rejection.message, model=name, **numbers)
    if model.set_back is not None and model.set_back.retry_at_ms > now:
        left = model.set_back.retry_at_ms - now
        why = unopened.failed(name, model.set_back.failures, model.set_back.code, model.set_back.message)
        message = f"{why}; next try in {left / 1000:.1f} s, or at once with `retry`"
        raise Refused(Code.BACKING_OFF, message, retry_after_ms=left, model=name, cause=model.set_back.code)
    if model.facts is None and now - model.fresh_ms >= INSPECTION_MS:
        message = f"no node has opened the source of {name} in {(now - model.fresh_ms) // 1000} s; is a node running?"
        raise Refused(Code.MODEL_UNREADY, message, retry_after_ms=5000, model=name)
    if model.facts is not None and not fleet.devices:
        raise Refused(Code.NO_NODE, "no node has joined yet", retry_after_ms=1000)
    if (unfit := cannot_fit(fleet, model)) is not None:
        numbers = {"need_bytes": unfit.need_bytes, "limit_bytes": unfit.limit_bytes}
        raise Refused(Code.CANNOT_FIT, unfit.message(name), model=name, **numbers)


def end_requests(draft: Draft, command: EndRequests) -> None:
    """Record how requests ended. One that has ended already changes nothing."""
    freed = False
    for report in command.ends:
        request = draft.fleet.requests.get(report.request)
        if request is None:
            continue
        endings.end(draft, request, report)
        freed = freed or _freed(draft.fleet, request.instance)
    if freed:
        advance(draft)


def cancel_request(draft: Draft, command: CancelRequest) -> None:
    request = draft.fleet.requests.get(command.request)
    if request is None:
        raise Refused(Code.REQUEST_UNKNOWN, f"no open request is called {command.request}; it may have ended already")
    endings.cancel(draft, request, "operator")
    if _freed(draft.fleet, request.instance):
        advance(draft)


def _freed(fleet: Fleet, instance: str | None) -> bool:
    """Whether an end may let others go on: it was a waiter's, or left an instance idle."""
    if instance is None:
        return True
    left = fleet.instances.get(instance)
    return left is None or not left.running


def interrupt(draft: Draft, command: Interrupt) -> None:
    """Its instance was lost. Untouched and at its first attempt: it is queued again, else it fails."""
    request = draft.fleet.requests.get(command.request)
    if request is None or request.instance is None or request.attempts != command.attempt:
        return
    if command.sent_chars or request.attempts >= ATTEMPTS:
        endings.fail(
            draft, request, command.code, command.message, prompt=command.prompt_tokens, completion=command.completion_tokens
        )
        if _freed(draft.fleet, request.instance):
            advance(draft)
        return
    draft.emit(
        RequestInterrupted(request=request.request, model=request.model, instance=request.instance, code=command.code),
        operation=request_operation(request.request),
    )
    advance(draft)
