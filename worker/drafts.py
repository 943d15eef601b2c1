"""Copies of models that draft for others leave the disk when no model and no engine of this node refers to them any more."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from worker.desired import Desired
from worker.shelf import Shelf
from worker.sources import copies

log = structlog.get_logger("drafts")


class Drafts:
    """`desired` is asked for the newest fold, `models` is `DIR/models`."""

    def __init__(self, models: Path, shelf: Shelf, desired: Callable[[], Desired]) -> None:
        self._models, self._shelf, self._desired = models, shelf, desired
        self._looked: Desired | None = None
        self._used: frozenset[str] | None = None
        self._clearing: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Look at the newest fold: at the first, and whenever a configuration is not used any more, see what may go."""
        desired, before = self._desired(), self._looked
        self._looked = desired
        if before is not None and before.models is desired.models and before.instances is desired.instances:
            return
        was, self._used = self._used, used(desired)
        if was is not None and was <= self._used:
            return
        if self._clearing is None or self._clearing.done():
            self._clearing = asyncio.create_task(self._clear(), name="drafts")

    async def close(self) -> None:
        if self._clearing is not None:
            self._clearing.cancel()
            await asyncio.gather(self._clearing, return_exceptions=True)

    async def _clear(self) -> None:
        async with self._shelf.still():
            desired = self._desired()
            held = {path.name for path in self._shelf.drafts(desired.models)}
            try:
                gone = await asyncio.to_thread(copies.remove, self._models, used(desired), held, drafted(desired))
            except OSError as error:
                log.warning("draft_copies_kept", reason=str(error))  # the next time
            else:
                if gone:
                    log.info("draft_copies_removed", copies=gone)


def used(desired: Desired) -> frozenset[str]:
    """Configurations of models that are not retired, and of all instances here, wherever they are: they may be told to read."""
    of_models = (model.facts.configuration for model in desired.models.values() if model.facts and not model.retired)
    return frozenset(of_models) | {wanted.configuration for wanted in desired.instances.values()}


def drafted(desired: Desired) -> frozenset[str]:
    """Of those, the configurations of models that name one which drafts for them."""
    named = (model for model in desired.models.values() if model.spec.arguments.get("draft_model"))
    return used(desired) & {model.facts.configuration for model in named if model.facts}
