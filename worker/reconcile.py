"""All instances of a node: each found or wanted one gets a keeper of its own, and is told what it should be."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from worker.adoption import adopt
from worker.desired import Desired
from worker.keeper import Keeper
from worker.report import Report
from worker.site import Site

REVIVE_S: Final = 1.0
"""After a fault of ours; a second one at once would only fill the log."""

log = structlog.get_logger("reconcile")


class Reconciler:
    """All instances of this node, each in a task of its own."""

    def __init__(self, site: Site, report: Callable[[Report], None]) -> None:
        self._site, self._report = site, report
        self.keepers: dict[str, Keeper] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._desired: Desired | None = None
        self._ended: set[str] = set()
        """Reported as gone; the plane's word of them is only late."""

    def add(self, keeper: Keeper) -> None:
        """Begin to keep an instance that was found."""
        instance = keeper.local.instance
        self.keepers[instance] = keeper
        self._tasks[instance] = task = asyncio.create_task(keeper.run(), name=f"keep:{instance}")
        task.add_done_callback(lambda _: self._over(instance, task))

    def follow(self, desired: Desired) -> None:
        """Tell every instance what it should be, and begin those that are new."""
        self._desired = desired
        self._ended = {instance for instance in self._ended if instance in desired.instances}
        for instance in desired.instances.keys() - self.keepers.keys() - self._ended:
            self.add(Keeper(self._site, instance, self._report))
        for instance, keeper in self.keepers.items():
            keeper.want(desired.instances.get(instance))

    async def close(self) -> None:
        """Stop keeping; processes stay as they are."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _over(self, instance: str, task: asyncio.Task[None]) -> None:
        self.keepers.pop(instance, None)
        self._tasks.pop(instance, None)
        self._ended.add(instance)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("keeper_failed", instance=instance, error=repr(error), exc_info=error)
            self._tasks[instance] = asyncio.create_task(self._revive(instance), name=f"revive:{instance}")

    async def _revive(self, instance: str) -> None:
        """A fault of ours must not leave an instance without a keeper: look at it anew, as a new worker would."""
        while True:
            await asyncio.sleep(REVIVE_S)
            keeper = Keeper(self._site, instance, self._report)
            try:
                await adopt(keeper.local)
            except Exception:
                log.exception("not_revived", instance=instance)
                keeper.local.forget()  # the next look begins with watches of its own
            else:
                break
        self.add(keeper)
        if self._desired is not None:
            keeper.want(self._desired.instances.get(instance))
