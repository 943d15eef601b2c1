"""A place that is removed under its daemon, by somebody who cleans up shared memory: it says so and makes way for another one.

It could make the directory anew, but all that it knows is of files that are gone. A fresh daemon begins with what is there, by
the way that every start takes. What engines map stays good: files without a name live as long as they are mapped.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from pool.arena import Arena
from pool.messages import PLACE_LOST, Attach, Refusal, Release, Request
from pool.residency import Refused

LOOK_S = 1.0
"""Between two looks at the place while nobody asks for anything."""
LINGER_S = 10.0
"""For sets that are on their way to devices: 60 GiB take 1.2 s, or 8 s unpinned."""
log = logging.getLogger("pool")


class Loss:
    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._known = asyncio.Event()
        self._attaching = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def known(self) -> None:
        """Return once the place is lost."""
        while not self.noticed():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._known.wait()

    def noticed(self) -> bool:
        """Look. True: it is lost."""
        if not self._known.is_set() and self._arena.lost:
            self._known.set()
            log.error("place_lost", extra={"segments": str(self._arena.root), "why": self.refusal.message})
        return self._known.is_set()

    @property
    def refusal(self) -> Refusal:
        """For whoever asks from now on."""
        return Refusal(
            code=PLACE_LOST,
            message=f"{self._arena.root} was removed while the pool daemon kept its sets there: it ends, the next one begins "
            "without any, and weights are brought again as they are wanted; leave that directory alone while the plane is up",
        )

    @contextlib.contextmanager
    def answering(self, request: Request) -> Iterator[None]:
        """While a request is answered. Raises Refused (`place_lost`), also in the place of what failed for that reason; giving
        back goes on."""
        if isinstance(request, Release):
            yield
            return
        if self.noticed():
            raise self._refused()
        try:
            with self._counted() if isinstance(request, Attach) else contextlib.nullcontext():
                yield
        except (OSError, Refused) as error:
            if isinstance(error, ConnectionError | TimeoutError) or not self.noticed():
                raise
            raise self._refused() from error

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._attaching += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._attaching -= 1
            if not self._attaching:
                self._idle.set()

    async def lingered(self) -> None:
        """Return once the sets that were asked for before have arrived, or after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._idle.wait()

    def _refused(self) -> Refused:
        return Refused(self.refusal.code, self.refusal.message)
