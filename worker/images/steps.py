"""The steps of the ladder that have to do with images: seek one, restore from it, check what came back."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Final

import structlog

from controlplane.fleet import ENGINE_OUTDATED
from controlplane.quantities import need_and_limit
from controlplane.rungs import Rung
from worker import checkpoint, hostmemory, knownanswer, parked
from worker.countdown import within
from worker.desired import Wanted
from worker.failure import StepFailed
from worker.images.fingerprint import outdated
from worker.images.manifest import ImageBroken, Manifest
from worker.images.reading import Reading
from worker.local import LocalInstance
from worker.moves import EngineState
from worker.skeleton import pretence

OUR_SHARE: Final = 0.7
"""Of a step's deadline is CRIU's: what comes after it, the way back included, must still fit."""
BLAMELESS: Final = frozenset({"pid_taken", "engine_died", "not_parked", "not_compared", "started_already", "no_release"})
"""Failures that say nothing of the image. `not_parked`: the engine has ended while it waited for its release;
`started_already`: a worker that is gone had begun a restore; `no_release`: the disk is full."""

log = structlog.get_logger("images")


async def seek(local: LocalInstance, wanted: Wanted) -> None:
    """Is this skeleton on disk already? Raises StepFailed (`engine_outdated`): it isn't, and can't be written."""
    record = local.directory.read()
    kind = record.kind if record is not None else ""
    found = await asyncio.to_thread(local.site.images.find, wanted.configuration, kind) if kind else None
    local.note(sought=True, kept=found.image if found is not None else None)
    if found is None and record is not None and kind:
        now = await asyncio.to_thread(local.site.images.fingerprint, wanted.configuration, kind)
        if why := outdated(record.started, now):
            raise StepFailed(ENGINE_OUTDATED, f"{why}: stop it and load it again")


async def restore(local: LocalInstance, wanted: Wanted) -> int:
    """Bring the engine back; returns the image's bytes. Whatever hinders that leads to a cold start, not to a failure.

    Raises StepFailed: `holder_died`; `unkillable`: something of it outlives SIGKILL; `no_memory`, with both numbers: a cold
    start would need as much.
    """
    cabinet, image = local.site.images, local.seen.image
    assert image is not None
    reading, local.reading = local.reading, None
    ends = time.monotonic() + local.site.deadlines.restore * OUR_SHARE
    try:
        manifest = await asyncio.to_thread(cabinet.store.read, image)
        if manifest.gpu is not None:
            checkpoint.get_ready(local, manifest.gpu)
        if reading is None or not reading.serves(manifest):
            reading = Reading(cabinet.store, manifest)
        await _compared(reading.orders(), ends - time.monotonic())
    except ImageBroken as broken:
        await _broken(local, wanted, image, broken)
        return 0
    except StepFailed as failure:
        _without(local, image, failure)
        return 0
    if (free := hostmemory.available_bytes()) < manifest.memory_bytes:
        local.stand_down()
        need, has = need_and_limit(manifest.memory_bytes, free)
        raise StepFailed("no_memory", f"bringing it back takes {need} of memory; this machine has {has}")
    local.directory.edit(woken=None, unproven=image, unread=True)
    try:
        await bring_back(local, manifest, cabinet.store.path(image), ends - time.monotonic(), reading)
    except ImageBroken as broken:
        await _broken(local, wanted, image, broken)
        await _killed(local)
        return 0
    except StepFailed as failure:
        _without(local, image, failure)
        if failure.code == "holder_died":
            raise
        if failure.code not in BLAMELESS:
            await asyncio.to_thread(cabinet.fail, image, wanted.configuration, "restore", failure.code, failure.message)
        if failure.code == "unkillable":
            raise  # no other engine beside what is left of this one
        await _killed(local)
        return 0
    await asyncio.to_thread(cabinet.store.used, image)
    local.note(image=image, checked=False, woken_for=None)
    local.restored_from, local.host_bytes = image, 0
    if wanted.directive is not None and wanted.directive.rung is Rung.CHECKPOINT:
        await checkpoint.weigh(local)
    return manifest.size_bytes


def _without(local: LocalInstance, image: str, failure: StepFailed) -> None:
    """The climb goes on without this image."""
    local.stand_down()
    local.note(image=None)
    log.warning("restore_given_up", instance=local.instance, image=image, code=failure.code, message=failure.message)


async def _killed(local: LocalInstance) -> None:
    """What was brought back, as far as it is there. Raises StepFailed (`unkillable`): no other engine beside this one."""
    held = await parked.asked(local, lambda: local.holder.kill(0))
    if held.engine is not None and held.exit is None:
        raise StepFailed("unkillable", f"the engine, pid {held.engine.pid}, outlives SIGKILL")


async def _broken(local: LocalInstance, wanted: Wanted, image: str, broken: ImageBroken) -> None:
    """It is never used again; a cold start follows."""
    local.stand_down()
    local.note(image=None)
    await asyncio.to_thread(
        local.site.images.fail, image, wanted.configuration, "verify", broken.code, broken.message, final=True
    )


async def check(local: LocalInstance, wanted: Wanted) -> str:
    """`knownanswer.check`; the first after a restore that is wrong is the image's fault, which is never used again, whatever
    worker or directive the restore was for. Raises StepFailed."""
    image = local.record.unproven
    try:
        found = await knownanswer.check(local)
    except StepFailed as failure:
        if failure.code == "check_mismatch" and image is not None:
            cabinet = local.site.images
            await asyncio.to_thread(
                cabinet.fail, image, wanted.configuration, "check", failure.code, failure.message, final=True
            )
        raise
    if image is not None:
        local.directory.edit(unproven=None)
    return found


async def bring_back(
    local: LocalInstance, manifest: Manifest, directory: Path, deadline_s: float, reading: Reading | None = None
) -> None:
    """From the bytes in `directory` to an engine that answers, or to a checkpointed one if it had a GPU.

    `deadline_s` is CRIU's. What it leaves of it `reading` has to end, and then once more the released engine to answer.

    Raises StepFailed, and ImageBroken if `reading` finds a wrong byte: the engine is there then, and was not released; or CRIU
    has failed, and it is no wonder.
    """
    cabinet, began = local.site.images, time.monotonic()
    kind, assigned = manifest.fingerprint.engine.partition(" ")[0], local.shelved
    assert assigned is not None, "prepared before"
    local.directory.edit(  # before it is there: should this worker die meanwhile, the next one knows what it finds
        kind=kind, left_device=manifest.gpu or None, skeleton_bytes=manifest.skeleton_bytes, started=manifest.fingerprint,
        checked=False, checked_sets=(), **pretence(kind, assigned.model.spec.arguments),
    )  # fmt: skip
    try:
        held = await parked.asked(
            local,
            lambda: local.holder.restore(
                cabinet.criu.path, directory, pid=manifest.pid, place=manifest.place, deadline_s=deadline_s, parked=True
            ),
        )
    except StepFailed as failure:
        if reading is not None and failure.code == "restore_failed":
            with contextlib.suppress(StepFailed):
                await _compared(reading.done(), deadline_s - (time.monotonic() - began))
        raise
    left_s = deadline_s - (time.monotonic() - began)
    if reading is not None:
        await _compared(reading.done(), left_s)
        local.directory.edit(unread=False)
    assert held.engine is not None
    if manifest.gpu is not None:
        local.watch("engine", held.engine)
        local.engine_state = None
        local.note(engine=EngineState.CHECKPOINTED, attached=None, awake=False, checked=False, woken_for=None, verified=True)
        return
    await parked.release(local, left_s)
    local.watch("engine", held.engine)  # not before: whoever asked for it knows what follows one that does not come back
    state = local.engine_state
    assert state is not None
    local.directory.edit(skeleton_bytes=max(state.bytes_private, manifest.skeleton_bytes))


async def _compared(comparing: Awaitable[None], deadline_s: float) -> None:
    """Raises ImageBroken; StepFailed (`not_compared`), if that takes longer: its threads go on, and nobody waits for them."""
    try:
        async with within(deadline_s):
            await comparing
    except TimeoutError:
        message = f"the image's digests were not compared within {deadline_s:.1f} s of the time that CRIU has"
        raise StepFailed("not_compared", message) from None
