"""A new image is proved: the engine comes back from its draft, answers as it did, and sleeps again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from worker import checkpoint, filling, knownanswer, occupancy
from worker.desired import Wanted
from worker.failure import StepFailed
from worker.images.manifest import Manifest
from worker.images.steps import OUR_SHARE, bring_back
from worker.images.store import DRAFT
from worker.local import LocalInstance
from worker.moves import EngineState, Goal
from worker.parts import Parts


@asynccontextmanager
async def returned(local: LocalInstance, manifest: Manifest, parts: Parts) -> "AsyncIterator[asyncio.Task[int] | None]":
    """The engine is brought back from its draft, as far as CRIU does that. Raises StepFailed.

    As in a climb, the pool fills the device from then on (what is yielded; None: there is none to fill), and the step process
    that puts the engine there gets ready. Neither is left afterwards.
    """
    draft = local.site.images.store.root / f"{manifest.image}{DRAFT}"
    coming = None
    if manifest.gpu is not None:
        checkpoint.get_ready(local, manifest.gpu)
        if local.seen.own_layout:
            coming = asyncio.create_task(parts.beside("fill", filling.fill(local)))
    try:
        with parts.of("restore"):
            await bring_back(local, manifest, draft, local.site.deadlines.build * OUR_SHARE / 2)
        yield coming
    finally:
        local.stand_down()
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            local.unfill()


async def prove(
    local: LocalInstance, goal: Goal, wanted: Wanted, manifest: Manifest, coming: "asyncio.Task[int] | None", *, parts: Parts
) -> str:
    """From there to one known answer and asleep again; what was compared. Raises StepFailed."""
    if manifest.gpu is not None:
        with parts.of("cuda_restore"):
            await back_on_gpu(local)
    if coming is not None:
        with parts.of("fill_wait"):
            await coming
    with parts.of("attach"):
        await occupancy.attach(local)
        if local.seen.staged is None:  # which a climb would mend by bringing it again
            raise StepFailed("unknown_set", "its weights left the pool while its image was being proved")
    with parts.of("wake"):
        await occupancy.wake(local, goal, wanted)
    with parts.of("check"):
        found = await knownanswer.check(local)
    with parts.of("asleep"):
        await occupancy.sleep(local)
        await occupancy.detach(local)
        await occupancy.verify(local)
    return found


async def back_on_gpu(local: LocalInstance) -> None:
    """Raises StepFailed: an image whose engine can't come back to its GPU proves nothing."""
    await checkpoint.up(local)
    if local.seen.engine is not EngineState.CONNECTED:
        raise StepFailed("cuda_failed", "the engine of the new image did not come back to its GPU")
