"""What waits, why, and how those who wait are told: with a code, a sentence, and numbers that stay true."""

from bisect import bisect_left

import msgspec

from controlplane.decisions.draft import Draft
from controlplane.decisions.endings import request_operation
from controlplane.decisions.limits import RENEWED_MS
from controlplane.events import RequestQueued
from controlplane.fleet.callers import Request

_NUMBERED = ("foreign_memory", "making_room")
"""Codes whose sentences name bytes, and who has them."""


class Want(msgspec.Struct, frozen=True):
    """All that waits for one model. `order` and `since_ms` are those of the first to come."""

    order: int
    since_ms: int
    model: str
    operation: str
    """What its climb is recorded under: the first one's own."""


class Wait(msgspec.Struct, frozen=True):
    """Why it can't run yet."""

    code: str
    reason: str


def announce(draft: Draft, waits: list[tuple[Want, Wait]]) -> None:
    """Tell those whose reason is a new kind of reason, or names other numbers; a place that merely moved up is not worth an
    event."""
    orders: list[int] | None = None
    for want, wait in waits:
        for waiting in draft.fleet.waiting.get(want.model, ()):
            request = draft.fleet.requests[waiting]
            if request.code == wait.code and not _outdated(request, wait, draft.now):
                continue
            if orders is None:
                fleet = draft.fleet
                orders = sorted(fleet.requests[r].order for ids_ in fleet.waiting.values() for r in ids_)
            place = bisect_left(orders, request.order) + 1
            draft.emit(
                RequestQueued(request=waiting, model=want.model, code=wait.code, reason=wait.reason, place=place),
                operation=request_operation(waiting),
            )


def _outdated(request: Request, wait: Wait, now: int) -> bool:
    return wait.code in _NUMBERED and request.reason != wait.reason and now - request.queued_ms >= RENEWED_MS
