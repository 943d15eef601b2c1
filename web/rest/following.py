"""The event feed of one reader: the log until it has caught up, then the view's events as they come, without a gap."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from controlplane.envelope import Recorded, to_wire
from web.plane_view import Change
from web.services import Services

PAGE: Final = 1000
BEHIND_LIMIT: Final = 10_000
"""Events kept for a slow reader; what it misses is read from the log later."""
BEAT_S: Final = 10.0


async def feed(services: Services, after: int, stream: str | None, kind: str | None) -> AsyncGenerator[bytes, None]:
    """Server-sent events for everything above position `after`, until the process stops."""
    fresh: deque[Recorded] = deque(maxlen=BEHIND_LIMIT)
    wake = asyncio.Event()

    def heard(change: Change) -> None:
        if isinstance(change, Recorded):
            fresh.append(change)
        wake.set()

    with services.view.listening(heard), services.told_to_stop(wake.set):
        yield b": following\n\n"
        while not services.stopping:
            wake.clear()
            for recorded in await _next(services, fresh, after):
                after = recorded.position
                if stream in (None, recorded.stream) and kind in (None, recorded.type):
                    yield b"id: %d\ndata: %b\n\n" % (after, to_wire(recorded))
            if services.view.fleet.position > after and (not fresh or fresh[-1].position > after):
                continue
            try:
                async with asyncio.timeout(BEAT_S):
                    await wake.wait()
            except TimeoutError:
                yield b": still here\n\n"


async def _next(services: Services, fresh: deque[Recorded], after: int) -> list[Recorded]:
    """What follows `after` now: out of the feed if it holds the very next event, else out of the log."""
    while fresh and fresh[0].position <= after:
        fresh.popleft()
    if fresh and fresh[0].position == after + 1:
        ready = list(fresh)
        fresh.clear()
        return ready
    if services.view.fleet.position > after:
        return await services.history.events_after(after, limit=PAGE)
    return []
