"""What people want of images: quota, pins, removals, new ones. Level-triggered: the newest fold says it, however it came."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from worker.desired import Desired, Wish
from worker.images.cabinet import Cabinet

AGAIN_S: Final = 5.0
"""Before another try to remove an image that could not be: its disk is read-only for a while, or busy."""

log = structlog.get_logger("images")


class Wishes:
    """`desired` is asked for the newest fold."""

    def __init__(self, cabinet: Cabinet, desired: Callable[[], Desired]) -> None:
        self._cabinet, self._desired = cabinet, desired
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._done: dict[str, Wish] = {}
        """What was carried out; the plane's word of it may be on its way."""
        self._again: dict[str, asyncio.TimerHandle] = {}
        self._collecting: asyncio.Task[None] | None = None
        self._closed = False

    def follow(self) -> None:
        """Look at the newest fold: pin, keep to the quota, and begin what is to be removed."""
        desired = self._desired()
        self._cabinet.budget.pinned = frozenset(name for name, wish in desired.images.items() if wish.pinned)
        self._cabinet.budget.configurations_pinned = frozenset(self._configurations(desired))
        self._keep_to(desired.limits.image_quota_bytes)
        self._done = {name: wish for name, wish in self._done.items() if desired.images.get(name) == wish}
        for name, wish in desired.images.items():
            if (wish.leaving or wish.anew) and name not in self._tasks and self._done.get(name) != wish:
                self._done[name] = wish
                self._tasks[name] = task = asyncio.create_task(self._remove(name, wish), name=f"image:{name}")
                task.add_done_callback(lambda _, name=name: self._removed(name))  # type: ignore[misc]

    async def close(self) -> None:
        """Nothing is begun any more; what is under way ends."""
        self._closed = True
        for again in self._again.values():
            again.cancel()
        collecting = [self._collecting] if self._collecting is not None else []
        await asyncio.gather(*self._tasks.values(), *collecting, return_exceptions=True)

    def _keep_to(self, quota_bytes: int) -> None:
        """Another quota counts at once: what is over it goes, the least valuable first."""
        if quota_bytes == self._cabinet.budget.given_bytes:
            return
        log.info("image_quota", was=self._cabinet.budget.given_bytes, now=quota_bytes)
        self._cabinet.budget.given_bytes = quota_bytes
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect(), name="images:quota")

    async def _collect(self) -> None:
        quota = None
        while quota != self._cabinet.budget.given_bytes:  # it may have been changed once more meanwhile
            quota = self._cabinet.budget.given_bytes
            try:
                await asyncio.to_thread(self._cabinet.collect)
            except Exception as error:
                log.error(
                    "quota_not_kept", quota=quota, reason=repr(error), exc_info=error
                )  # the next image that is made tries again

    def _removed(self, name: str) -> None:
        """The plane may have said more of it meanwhile (first to be made anew, say, and then to leave): look again."""
        self._tasks.pop(name, None)
        if not self._closed:
            self.follow()

    def _retry(self, name: str) -> None:
        self._again.pop(name, None)
        self._done.pop(name, None)
        self.follow()

    def _configurations(self, desired: Desired) -> set[str]:
        pins = desired.limits.image_pins
        named = {model.facts.configuration for name in pins if (model := desired.models.get(name)) and model.facts}
        return named | {name for name in pins if name not in desired.models}

    async def _remove(self, name: str, wish: Wish) -> None:
        try:
            if wish.leaving is not None:
                await asyncio.to_thread(self._cabinet.remove, name, wish.leaving[1])
            else:
                await asyncio.to_thread(self._cabinet.forget, name)
        except Exception as error:
            log.error("image_not_removed", image=name, reason=repr(error), again_s=AGAIN_S, exc_info=error)
            if name not in self._again and not self._closed:
                self._again[name] = asyncio.get_running_loop().call_later(AGAIN_S, self._retry, name)
        else:
            log.info("image_removed", image=name, by=wish.leaving[0] if wish.leaving else "", anew=wish.anew)
