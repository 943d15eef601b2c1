"""Ends of requests, sent to the decider in batches: off the callers' path, and never lost while this process lives."""

import asyncio
from collections import deque
from typing import Final

import structlog

from controlplane import ids
from controlplane.bus import Bus
from controlplane.commands import End, EndRequests, Order
from controlplane.refusal import Code, Refused
from controlplane.subjects import COMMAND_GATEWAY

_log = structlog.get_logger(__name__)

FLUSH_S: Final = 0.02
"""An instance looks busy this much longer than it is; far below the idle limits that an end starts."""
FLUSH_COUNT: Final = 64
BATCH_LIMIT: Final = 256
"""After an outage the backlog goes in batches of this size: some 60 KB, well below NATS's 1 MiB."""
RETRY_S: Final = 0.2


class Ends:
    """The batch that is under way, and what waits behind it."""

    def __init__(self, bus: Bus, actor: str) -> None:
        self._bus = bus
        self.actor = actor
        self._waiting: deque[End] = deque()
        self._sending: tuple[End, ...] = ()
        self._some, self._full, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._hurry = False

    def add(self, end: End) -> None:
        """Accept an end; it will reach the decider."""
        self._waiting.append(end)
        self._idle.clear()
        self._some.set()
        if len(self._waiting) >= FLUSH_COUNT:
            self._full.set()

    def holds(self, request: str) -> bool:
        """Whether an end of `request` is still to be acknowledged."""
        return any(end.request == request for end in (*self._sending, *self._waiting))

    def __len__(self) -> int:
        return len(self._sending) + len(self._waiting)

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._some.wait()
            if not self._hurry:
                try:
                    async with asyncio.timeout(FLUSH_S):
                        await self._full.wait()
                except TimeoutError:
                    pass
            self._sending = tuple(self._waiting.popleft() for _ in range(min(BATCH_LIMIT, len(self._waiting))))
            self._full.clear()
            if not self._waiting:
                self._some.clear()
            await self._deliver(Order(id=ids.new(ids.COMMAND), actor=self.actor, body=EndRequests(ends=self._sending)))
            self._sending = ()
            if not self._waiting:
                self._idle.set()

    async def _deliver(self, order: Order) -> None:
        attempts = 0
        while True:
            try:
                await self._bus.command(COMMAND_GATEWAY, order, timeout_s=5)
            except Refused as refused:
                if refused.code is not Code.UNAVAILABLE:
                    requests = [end.request for end in self._sending]
                    _log.error("ends_refused", code=refused.code, message=refused.message, requests=requests)
                    return
                attempts += 1
                if attempts in (1, 10, 100):
                    _log.warning("ends_unacknowledged", attempts=attempts, ends=len(self), reason=refused.message)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def flush(self, deadline_s: float) -> bool:
        """Return whether everything was acknowledged within the deadline."""
        self._hurry = True
        self._full.set()
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        except TimeoutError:
            _log.error("ends_left", ends=len(self))
            return False
        return True
