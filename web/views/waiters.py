"""The queue: who waits, at which place, for what, since when."""

from typing import Final

import msgspec

from controlplane.fleet import Fleet

SHOWN: Final = 12
"""Enough to see who is next and why; a longer queue is told by its length."""


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    place: int
    request: str
    model: str
    code: str
    reason: str
    since_ms: int
    attempts: int


class WaitersView(msgspec.Struct, frozen=True, kw_only=True):
    shown: tuple[Waiter, ...]
    total: int


def waiters(fleet: Fleet) -> WaitersView:
    queued = sorted((r for r in fleet.requests.values() if r.instance is None), key=lambda r: r.order)
    shown = (
        Waiter(
            place=place,
            request=r.request,
            model=r.model,
            code=r.code,
            reason=r.reason or "has just arrived",
            since_ms=r.accepted_ms,
            attempts=r.attempts,
        )
        for place, r in enumerate(queued[:SHOWN], start=1)
    )
    return WaitersView(shown=tuple(shown), total=len(queued))
