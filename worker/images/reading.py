"""The comparison of an image's bytes with their digests. It begins when a climb knows its image, while the holder starts.

What CRIU goes by has been compared before it begins. Of the memory that it brings back the comparison goes on beside it: until
that is done the engine waits for its release, and is killed where it stands if a byte is wrong.
"""

import asyncio
import time
from typing import Final

from worker.images.manifest import Manifest
from worker.images.store import Store

FRESH_S: Final = 5.0
"""What was read longer ago is read again: a climb may have waited for its cells since."""


class Reading:
    """Begins at once, in two threads."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._manifest, self._began = manifest, time.monotonic()
        self._orders, self._memory = (
            asyncio.create_task(asyncio.to_thread(store.verify, manifest, memory=memory)) for memory in (False, True)
        )
        for task in (self._orders, self._memory):
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a climb that was given up asks no more

    def serves(self, manifest: Manifest) -> bool:
        """Whether it is of this very image, and recent."""
        return self._manifest == manifest and time.monotonic() - self._began < FRESH_S

    async def orders(self) -> None:
        """All but memory is as it was written. Raises ImageBroken, as `Store.verify`."""
        await asyncio.shield(self._orders)

    async def done(self) -> None:
        """All is. Raises ImageBroken, as `Store.verify`."""
        await self.orders()
        await asyncio.shield(self._memory)
