"""Deadlines for others, in time that this process has seen pass.

While it stood still (it was stopped, or its machine was) it could hear no answer, and once it goes on the clock is the first
thing that it reads: the answers that came meanwhile lie unread. So a standstill begins a deadline anew, `ANEW` times at most:
of the time between standstills no more than `ANEW + 1` deadlines pass, however badly the machine thrashes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

STEP_S: Final = 0.5
STOOD_S: Final = 1.0
"""A step that comes so much late shows a standstill."""
ANEW: Final = 4
"""Standstills that begin one deadline anew. After these, whoever has not answered is held to it like on any busy machine."""


class Countdown:
    """Calls once, after so many seconds without a standstill among them; after the last of `ANEW`, without regard to more."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._call, self._anew = seconds, call, ANEW
        self._begin()

    def cancel(self) -> None:
        self._handle.cancel()

    def _begin(self) -> None:
        self._ends = self._loop.time() + self._seconds
        self._step()

    def _step(self) -> None:
        self._due = min(self._loop.time() + STEP_S, self._ends)
        self._handle = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._due > STOOD_S and self._anew:
            self._anew -= 1
            self._begin()
        elif now >= self._ends:
            self._call()
        else:
            self._step()


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout`, begun anew by a standstill, `ANEW` times at most. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as scope:
        countdown = Countdown(seconds, lambda: scope.reschedule(loop.time()))
        try:
            yield
        finally:
            countdown.cancel()
