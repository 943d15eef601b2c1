"""Right of way: what somebody waits for goes before what is done in spare time."""

import asyncio
import contextlib
from collections.abc import Iterator


class Way:
    """In the event loop's thread."""

    def __init__(self) -> None:
        self._busy = 0
        self._clear = asyncio.Event()
        self._clear.set()

    def enter(self) -> None:
        """Somebody waits from now on, until `leave`."""
        self._busy += 1
        self._clear.clear()

    def leave(self) -> None:
        self._busy -= 1
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
        """Return once nobody waits. Asked before each piece of spare work, which takes tens of milliseconds."""
        await self._clear.wait()
