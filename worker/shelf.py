"""Models' sources on this node and their weight sets in the pool. Work for one model is done once, whoever asks."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from pathlib import Path

from msgspec import Struct

from controlplane.fleet import Model
from controlplane.spec import ModelFacts
from pool.client import PoolClient, PoolRefused
from pool.described import Described
from pool.messages import Staged, Staging
from worker.failure import StepFailed
from worker.moves import Goal
from worker.sources import Prepared

RETRY_S = 0.2
"""Between two tries to reach a pool daemon that is being started again (0.1-0.3 s here)."""

ProgressCall = Callable[[int, int], None]
"""Bytes done, bytes in all (0: unknown)."""


class Shelved(Struct, frozen=True, kw_only=True):
    """A model whose source is on this node."""

    goal: Goal
    source: Path
    """Directory with the converted weights, tokenizer, configuration."""
    facts: ModelFacts
    model: Model
    draft: Path | None = None
    """Directory of the model that drafts for it."""

    def there(self) -> bool:
        return self.source.exists() and (self.draft is None or self.draft.exists())


Prepare = Callable[[Model, ProgressCall], Awaitable[Prepared]]


class Shelf:
    """`prepare` brings one source onto this node and opens it; it raises StepFailed when that can't be done."""

    def __init__(self, prepare: Prepare, pool_socket: str) -> None:
        self._prepare, self.pool_socket = prepare, pool_socket
        self._shelved: dict[Goal, Shelved] = {}
        self._turns: dict[Goal, asyncio.Lock] = {}
        self.room_coming: Callable[[], bool] = lambda: False
        """Whether a set has been dismissed and not left yet: worth waiting for when the pool is full."""
        self._one = asyncio.Semaphore(1)
        """One conversion at a time: it reads and writes all of a model, and may load it."""

    async def prepared(self, model: Model, progress: ProgressCall) -> Shelved:
        """The model's source, fetched and converted if need be. Raises StepFailed (`weights_unusable` ...)."""
        goal = Goal(model.model, model.revision)
        async with self._turns.setdefault(goal, asyncio.Lock()):
            known = self._shelved.get(goal)
            if known is None or not known.there():
                async with self._one:
                    found = await self._prepare(model, progress)
                known = self._shelved[goal] = Shelved(
                    goal=goal, source=found.source_dir, facts=found.facts, model=model, draft=found.draft_dir
                )
        return known

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """A while in which no source is prepared. That may have to be waited for as long as a model takes to be fetched."""
        async with self._one:
            yield

    def drafts(self, models: Mapping[str, Model]) -> set[Path]:
        """Of the drafting models that were found, those of `models` as they are now: the plane need not know of all yet."""
        found = ((models.get(goal.model), goal.revision, one.draft) for goal, one in self._shelved.items())
        return {
            draft for model, revision, draft in found
            if draft is not None and model is not None and not model.retired and model.revision == revision
        }  # fmt: skip

    def sources(self, goals: Collection[Goal]) -> set[Path]:
        """Of the sources that were found, those for `goals`."""
        return {one.source for goal, one in self._shelved.items() if goal in goals}

    def forget(self, goal: Goal) -> None:
        """Open the source again next time (an operator said `retry`)."""
        self._shelved.pop(goal, None)

    async def staged(self, shelved: Shelved, progress: ProgressCall, *, patience_s: float) -> Staged:
        """Its weight set in the pool. A daemon that is away, or a pool that makes room, is waited for `patience_s`.

        Raises StepFailed: `pool_away`, or the pool's own reason (`over_budget` with both numbers, `bad_source` ...).
        """

        def tell(staging: Staging) -> None:
            progress(staging.done_bytes, staging.total_bytes)

        ends = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                async with self.pool() as pool:
                    return await pool.stage(shelved.source, tell)
            except PoolRefused as refused:
                full = refused.code in ("over_budget", "no_room")
                if not (full and self.room_coming()) or asyncio.get_running_loop().time() > ends:
                    raise StepFailed(_code(refused.code), refused.message) from refused
            except (OSError, TimeoutError) as error:
                if asyncio.get_running_loop().time() > ends:
                    raise StepFailed("pool_away", f"the pool daemon did not answer for {patience_s:g} s: {error!r}") from error
            await asyncio.sleep(RETRY_S)

    async def found(self, shelved: Shelved, form: str, *, patience_s: float) -> Staged | None:
        """Its weight set in an engine's own form, if the pool has it. A daemon that is away is waited for `patience_s`.

        Raises StepFailed: `pool_away`, `weights_unusable`.
        """
        ends = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                async with self.pool() as pool:
                    return await pool.find(shelved.source, form)
            except PoolRefused as refused:
                raise StepFailed(_code(refused.code), refused.message) from refused
            except (OSError, TimeoutError) as error:
                if asyncio.get_running_loop().time() > ends:
                    raise StepFailed("pool_away", f"the pool daemon did not answer for {patience_s:g} s: {error!r}") from error
            await asyncio.sleep(RETRY_S)

    async def described(self, *, deadline_s: float = 2.0) -> Described | None:
        """What the pool holds; None while no daemon answers."""
        with contextlib.suppress(OSError, TimeoutError, PoolRefused):
            async with asyncio.timeout(deadline_s), self.pool() as pool:
                return await pool.describe()
        return None

    async def dropped(self, weight_set: str) -> bool:
        """Take a set out of the pool. False: not now (somebody maps it, or no daemon answers)."""
        try:
            async with self.pool() as pool:
                await pool.drop(weight_set)
        except PoolRefused as refused:
            return refused.code == "unknown_set"
        except (OSError, TimeoutError):
            return False
        return True

    @contextlib.asynccontextmanager
    async def pool(self) -> AsyncIterator[PoolClient]:
        """A connection of its own for each conversation."""
        client = await PoolClient.connect(self.pool_socket)
        try:
            yield client
        finally:
            await client.close()


def _code(refused: str) -> str:
    return refused if refused in ("over_budget", "no_room") else "weights_unusable"
