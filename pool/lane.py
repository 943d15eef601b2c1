"""One thread a device: everything that talks to the device takes its turn there, wakes first, pinning last."""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from pool.gpu import Gpu

T = TypeVar("T")


class Turn(IntEnum):
    """Lower goes first. A turn is never interrupted, so the last kind is cut into pieces of tens of milliseconds."""

    NOW = 0
    """Somebody waits: copies, and the memory that they may be waiting for."""
    SPARE = 1
    """Pinning ahead of need."""
    LAST = 2


_Job = tuple[int, int, Callable[[], None] | None]


class Lane:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._work, name=f"pool-{gpu.uuid}", daemon=True)
        self._thread.start()

    def submit(self, turn: Turn, work: Callable[[], T]) -> asyncio.Future[T]:
        """Called in the event loop; the result arrives there. Cancelling it does not stop the work."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(give: Callable[[Any], None], value: object) -> None:
            if not future.cancelled():
                give(value)

        def job() -> None:
            try:
                result = work()
            except BaseException as error:
                loop.call_soon_threadsafe(settle, future.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, future.set_result, result)

        self._jobs.put((turn, next(self._numbers), job))
        return future

    async def close(self) -> None:
        """After all that has been submitted."""
        self._jobs.put((Turn.LAST, next(self._numbers), None))
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        self.gpu.bind()
        while True:
            _, _, job = self._jobs.get()
            if job is None:
                return
            job()
