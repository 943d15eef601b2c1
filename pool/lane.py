"""One thread a device: everything that talks to the device takes its turn there, wakes first, pinning last."""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from pool.gpu import Gpu
from pool.residency import Refused

T = TypeVar("T")

CLOSE_S = 15.0
"""60 GiB that are on their way take 8 s unpinned."""
log = logging.getLogger("pool")


class Silent(Refused):
    """A device's driver, or what goes before on its lane, has not ended within a deadline. What was asked for may come yet."""

    def __init__(self, device: str, waited_s: float) -> None:
        super().__init__(
            "device_silent",
            f"{device} has not answered for {waited_s:g} s: its driver hangs, or copies to it take that long; see nvidia-smi "
            "and the kernel's log (dmesg), and end what hangs there",
        )


async def within(device: str, future: asyncio.Future[T], deadline_s: float) -> T:
    """What a lane's work comes to. Raises Silent after the deadline, and then the work goes on."""
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            return await asyncio.shield(future)
    except TimeoutError:
        if not limit.expired():
            raise  # the work's own
        raise Silent(device, deadline_s) from None


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

    async def answer(self, turn: Turn, work: Callable[[], T], deadline_s: float) -> T:
        """As `submit`, for what only looks. Raises Silent after the deadline; then it is not done, if it has not begun."""
        given_up = threading.Event()
        asked = self.submit(turn, lambda: None if given_up.is_set() else work())
        try:
            found = await within(self.gpu.uuid, asked, deadline_s)
        finally:
            given_up.set()
        assert found is not None
        return found

    async def close(self) -> None:
        """After all that has been submitted; a driver that hangs is left to the end of the process."""
        self._jobs.put((Turn.LAST, next(self._numbers), None))
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            log.error("lane_silent", extra={"device": self.gpu.uuid, "waited_s": CLOSE_S})

    def _work(self) -> None:
        self.gpu.bind()
        while True:
            _, _, job = self._jobs.get()
            if job is None:
                return
            job()
