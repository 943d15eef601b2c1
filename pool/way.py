"""Right of way: what somebody waits for goes before what is done in spare time."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

QUIET_S = 0.5
"""Without anybody who waits, before spare work goes on: wakes come in a row."""


class Way:
    """In the event loop's thread."""

    def __init__(self) -> None:
        self._busy = 0
        self._left = 0.0
        """When somebody last ceased to wait, monotonic."""
        self._clear = asyncio.Event()
        self._clear.set()

    def enter(self) -> None:
        """Somebody waits from now on, until `leave`."""
        self._busy += 1
        self._clear.clear()

    def leave(self) -> None:
        self._busy -= 1
        self._left = time.monotonic()
        if not self._busy:
            self._clear.set()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Somebody waits for what is done meanwhile."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    async def clear(self) -> None:
        """Return once nobody waits, nor has for a while. Asked before each piece of spare work, which takes milliseconds."""
        while True:
            await self._clear.wait()
            if (rest := self._left + QUIET_S - time.monotonic()) <= 0:
                return
            await asyncio.sleep(rest)
