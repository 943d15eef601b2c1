"""What waits, why, and how those who wait are told: with a code, and a sentence that stays true."""

from bisect import bisect_left

import msgspec

from controlplane.decisions.draft import Draft
from controlplane.decisions.endings import request_operation
from controlplane.decisions.limits import RENEWED_MS
from controlplane.events import RequestQueued
from controlplane.fleet.callers import Request

_RENEWED = ("foreign_memory", "making_room", "slot_busy")
"""Codes whose sentences name what may be another while they stay: bytes, who has them, who has the place and what it does."""


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
    """Tell those whose reason is a new kind of reason, or has become another sentence; a place that merely moved up is
    not worth an event."""
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
    return wait.code in _RENEWED and request.reason != wait.reason and now - request.queued_ms >= RENEWED_MS
