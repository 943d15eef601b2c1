"""An image is built: the engine goes to disk and is proved to come back from there."""

import asyncio
import errno
import shutil
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from controlplane.quantities import human_bytes
from worker import checkpoint, knownanswer, occupancy
from worker.checkpoint import holder
from worker.desired import Wanted
from worker.failure import StepFailed
from worker.holdermessages import Held
from worker.images import bulk, facts
from worker.images.budget import NoRoom
from worker.images.fingerprint import Fingerprint, MappedFile
from worker.images.manifest import File, Manifest
from worker.images.steps import OUR_SHARE, bring_back, seek
from worker.ledge import DISK_FULL, stays_unsaved
from worker.local import LocalInstance
from worker.moves import EngineState, Goal

ROOM: Final = 1.25
"""Times the engine's own memory must be free on disk: an image has some percent more than that, and the disk is others' too."""
FULL_BYTES: Final = 1 << 20
"""A disk with less than this left is full: CRIU writes in larger pieces."""

NO_ROOM: Final = frozenset({"no_memory", "no_device_memory"})
"""Failures of a build that say nothing of the image, nor of any that is built when there is room."""


async def build(local: LocalInstance, goal: Goal, wanted: Wanted) -> tuple[int, str]:
    """Write the engine to disk and prove it: restored once, the known answer given, asleep again. Raises StepFailed.

    Skeletons of one configuration have one image, so they take turns, and what the first has written serves the next.
    """
    cabinet = local.site.images
    fingerprint = cabinet.fingerprint(wanted.configuration, local.record.kind)
    writing = cabinet.writing(fingerprint.image)
    waits = writing.locked()
    async with writing:
        if waits:
            await seek(local, wanted)
            if local.seen.kept is not None:
                return 0, ""
        return await _built(local, goal, wanted, fingerprint)


async def _built(local: LocalInstance, goal: Goal, wanted: Wanted, fingerprint: Fingerprint) -> tuple[int, str]:
    cabinet, began, image = local.site.images, time.monotonic(), fingerprint.image
    settling: asyncio.Task[tuple[File, ...]] | None = None
    try:
        made = await _dumped(local, image, wanted)
        manifest = Manifest(
            image=image, fingerprint=fingerprint, mapped=made[1], files=(), gpu=made[2], pid=made[0].inner_pid,
            place=made[0].park_in, skeleton_bytes=local.record.skeleton_bytes, made_ms=time.time_ns() // 1_000_000, proof="",
        )  # fmt: skip
        draft = cabinet.store.root / f"{image}.draft"
        settling = asyncio.create_task(asyncio.to_thread(cabinet.store.settle, image))
        await bring_back(local, manifest, draft, local.site.deadlines.build * OUR_SHARE / 2)
        if manifest.gpu is not None:
            await _back_on_gpu(local)
        proof = await _proved(local, goal, wanted)
        files = await settling
        took_ms = round((time.monotonic() - began) * 1000)
        whole = await asyncio.to_thread(cabinet.publish, replace(manifest, files=files, proof=proof, took_ms=took_ms))
    except OSError as error:
        code = "no_space" if error.errno == errno.ENOSPC else "image_failed"
        kept = code == "no_space" and stays_unsaved(wanted) and local.watched("engine")
        if not kept:
            await _give_up(local, image, wanted, code, str(error))
        raise StepFailed(code if kept else "image_failed", f"the image can't be written: {error}") from error
    except StepFailed as failure:
        full = failure.code in DISK_FULL and stays_unsaved(wanted)
        if full or failure.code in NO_ROOM:  # the image may be as good as any; there was no room to write or to prove it
            await asyncio.to_thread(cabinet.store.discard, image)
        else:
            await _give_up(local, image, wanted, failure.code, failure.message)
        raise
    finally:
        if settling is not None:  # a thread can't be stopped, and must not meet the next draft of this image
            await asyncio.gather(settling, return_exceptions=True)
        await asyncio.to_thread(cabinet.store.discard, image)  # published it is no draft any more; else its deadline has passed
    local.note(kept=whole.image, sought=True)
    return whole.size_bytes, ""


async def _dumped(local: LocalInstance, image: str, wanted: Wanted) -> tuple[Held, tuple[MappedFile, ...], str | None]:
    """The engine is gone afterwards. Raises StepFailed (`no_space`, `over_quota`, `dump_failed`, ...); after the first two the
    engine sleeps as before, if it is to stay (`stays_unsaved`).

    Returns who it was, what it had mapped, and the GPU that it was taken off first.
    """
    cabinet = local.site.images
    draft = await asyncio.to_thread(cabinet.store.draft, image)
    try:
        await asyncio.to_thread(cabinet.make_room, round(local.record.skeleton_bytes * ROOM))
    except NoRoom as full:
        raise StepFailed(full.code, full.message) from full
    held = await holder(local, local.holder.ask)
    if held.engine is None or held.exit is not None:
        raise StepFailed("engine_died", "there is no engine to be saved")
    gpu = None
    if checkpoint.theatre(local) is not None:
        if local.seen.engine is not EngineState.CHECKPOINTED:
            await checkpoint.down(local)
        gpu = local.record.left_device or ""
        if open_still := facts.gpu_files(held.engine.pid):
            raise StepFailed("gpu_files_open", f"off its GPU, the engine has files of the driver open still: {open_still}")
    mapped = await asyncio.to_thread(facts.mapped_files, held.engine.pid)
    local.unwatch("engine")  # its end is meant
    deadline_s = local.site.deadlines.build * OUR_SHARE / 2
    try:
        await holder(local, lambda: local.holder.dump(cabinet.criu.path, draft, deadline_s=deadline_s))
    except StepFailed as failure:
        free = shutil.disk_usage(draft).free
        if failure.code == "dump_failed" and free < FULL_BYTES:  # others had taken the room meanwhile
            await asyncio.to_thread(cabinet.store.discard, image)
            if stays_unsaved(wanted):
                await _as_before(local, gpu)
            message = f"the disk ran full while it was written: {human_bytes(free)} are left in {cabinet.store.root}"
            raise StepFailed("no_space", f"{message}; {failure.message}") from failure
        raise
    await to_its_end(lambda: bulk.lift(draft, held.inner_pid, local.directory.path))
    return held, mapped, gpu


async def _as_before(local: LocalInstance, gpu: str | None) -> None:
    """After a dump that came to nothing CRIU lets the engine go on. Raises StepFailed if it doesn't."""
    held = await holder(local, local.holder.ask)
    if held.engine is None or held.exit is not None:
        raise StepFailed("engine_died", "the engine did not outlive a dump that the disk had no room for")
    local.watch("engine", held.engine)
    if gpu is None:
        await checkpoint.rejoined(local, held, local.site.deadlines.attach)
    else:  # parked still
        await _back_on_gpu(local)


async def to_its_end(work: Callable[[], object]) -> None:
    """In a thread. It can't be stopped, so whoever is cancelled waits for it: it must not meet the next draft of this image."""
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise


async def _back_on_gpu(local: LocalInstance) -> None:
    """Raises StepFailed: an image whose engine can't come back to its GPU proves nothing."""
    await checkpoint.up(local)
    if local.seen.engine is not EngineState.CONNECTED:
        raise StepFailed("cuda_failed", "the engine of the new image did not come back to its GPU")


async def _proved(local: LocalInstance, goal: Goal, wanted: Wanted) -> str:
    await occupancy.attach(local)
    await occupancy.wake(local, goal, wanted)
    found = await knownanswer.check(local)
    await occupancy.sleep(local)
    await occupancy.detach(local)
    await occupancy.verify(local)
    return found


async def _give_up(local: LocalInstance, image: str, wanted: Wanted, code: str, message: str) -> None:
    cabinet = local.site.images
    await asyncio.to_thread(cabinet.store.discard, image)
    await asyncio.to_thread(cabinet.fail, image, wanted.configuration, "build", code, message, final=True)
