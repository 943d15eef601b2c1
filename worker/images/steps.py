"""The steps of the ladder that have to do with images: seek one, restore from it, build one."""

import asyncio
import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from msgspec.structs import replace

from controlplane.quantities import human_bytes, need_and_limit
from controlplane.rungs import Rung
from worker import checkpoint, hostmemory, knownanswer, occupancy
from worker.checkpoint import holder
from worker.desired import Wanted
from worker.failure import StepFailed
from worker.holdermessages import Held
from worker.images import bulk, facts
from worker.images.budget import NoRoom
from worker.images.fingerprint import Fingerprint, MappedFile
from worker.images.manifest import File, ImageBroken, Manifest
from worker.images.reading import Reading
from worker.local import LocalInstance
from worker.moves import EngineState, Goal
from worker.skeleton import pretence

OUR_SHARE: Final = 0.7
"""Of a step's deadline is CRIU's: what comes after it, the way back included, must still fit."""
ROOM: Final = 1.25
"""Times the engine's own memory must be free on disk: an image has some percent more than that, and the disk is others' too."""
FULL_BYTES: Final = 1 << 20
"""A disk with less than this left is full: CRIU writes in larger pieces."""
BLAMELESS: Final = frozenset({"pid_taken", "engine_died"})
"""Failures that say nothing of the image."""

NO_ROOM: Final = frozenset({"no_memory", "no_device_memory"})
"""Failures of a build that say nothing of the image, nor of any that is built when there is room."""

log = structlog.get_logger("images")


async def seek(local: LocalInstance, wanted: Wanted) -> None:
    """Is this skeleton on disk already?"""
    record = local.directory.read()
    kind = record.kind if record is not None else ""
    found = await asyncio.to_thread(local.site.images.find, wanted.configuration, kind) if kind else None
    local.note(sought=True, kept=found.image if found is not None else None)


async def restore(local: LocalInstance, wanted: Wanted) -> int:
    """Bring the engine back; returns the image's bytes. Whatever hinders that leads to a cold start, not to a failure.

    Raises StepFailed: `holder_died`; `unkillable`: something of it outlives SIGKILL; `no_memory`, with both numbers: a cold
    start would need as much.
    """
    cabinet, image = local.site.images, local.seen.image
    assert image is not None
    reading, local.reading = local.reading, None
    try:
        manifest = await asyncio.to_thread(cabinet.store.read, image)
        if manifest.gpu is not None:
            checkpoint.get_ready(local, manifest.gpu)
        if reading is None or not reading.serves(manifest):
            reading = Reading(cabinet.store, manifest)
        await reading.done()  # 3 GB in 75 ms on 16 cores, and an engine with a wrong byte never runs, not even parked
    except ImageBroken as broken:
        local.stand_down()
        local.note(image=None)  # a cold start follows
        await asyncio.to_thread(cabinet.fail, image, wanted.configuration, "verify", broken.code, broken.message, final=True)
        return 0
    if (free := hostmemory.available_bytes()) < manifest.size_bytes:
        local.stand_down()
        need, has = need_and_limit(manifest.size_bytes, free)
        raise StepFailed("no_memory", f"bringing it back takes {need} of memory; this machine has {has}")
    try:
        await _restored(local, manifest, cabinet.store.path(image), local.site.deadlines.restore * OUR_SHARE)
    except StepFailed as failure:
        local.stand_down()
        local.note(image=None)
        if failure.code == "holder_died":
            raise
        if failure.code not in BLAMELESS:
            await asyncio.to_thread(cabinet.fail, image, wanted.configuration, "restore", failure.code, failure.message)
        if failure.code == "unkillable":
            raise  # no other engine beside what is left of this one
        await holder(local, lambda: local.holder.kill(0))
        return 0
    await asyncio.to_thread(cabinet.store.used, image)
    local.directory.edit(checked=False, checked_sets=(), woken=None, unproven=image)
    local.note(image=image, checked=False, woken_for=None)
    local.restored_from, local.host_bytes = image, 0
    if wanted.directive is not None and wanted.directive.rung is Rung.CHECKPOINT:
        await checkpoint.weigh(local)
    return manifest.size_bytes


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
        made = await _dumped(local, image)
        manifest = Manifest(
            image=image, fingerprint=fingerprint, mapped=made[1], files=(), gpu=made[2], pid=made[0].inner_pid,
            place=made[0].park_in, skeleton_bytes=local.record.skeleton_bytes, made_ms=time.time_ns() // 1_000_000, proof="",
        )  # fmt: skip
        draft = cabinet.store.root / f"{image}.draft"
        settling = asyncio.create_task(asyncio.to_thread(cabinet.store.settle, image))
        await _restored(local, manifest, draft, local.site.deadlines.build * OUR_SHARE / 2)
        if manifest.gpu is not None:
            await _back_on_gpu(local)
        proof = await _proved(local, goal, wanted)
        files = await settling
        took_ms = round((time.monotonic() - began) * 1000)
        whole = await asyncio.to_thread(cabinet.publish, replace(manifest, files=files, proof=proof, took_ms=took_ms))
    except OSError as error:
        await _give_up(local, image, wanted, "no_space" if error.errno == errno.ENOSPC else "image_failed", str(error))
        raise StepFailed("image_failed", f"the image can't be written: {error}") from error
    except StepFailed as failure:
        if failure.code in NO_ROOM:  # the image may be as good as any; there was no room to write or to prove it
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


async def _dumped(local: LocalInstance, image: str) -> tuple[Held, tuple[MappedFile, ...], str | None]:
    """Raises StepFailed (`no_space`, `dump_failed`, ...). The engine is gone afterwards.

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
            message = f"the disk ran full while it was written: {human_bytes(free)} are left in {cabinet.store.root}"
            raise StepFailed("no_space", f"{message}; {failure.message}") from failure
        raise
    await to_its_end(lambda: bulk.lift(draft, held.inner_pid, local.directory.path))
    return held, mapped, gpu


async def to_its_end(work: Callable[[], object]) -> None:
    """In a thread. It can't be stopped, so whoever is cancelled waits for it: it must not meet the next draft of this image."""
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.gather(working, return_exceptions=True)
        raise


async def _restored(local: LocalInstance, manifest: Manifest, directory: Path, deadline_s: float) -> None:
    """From the bytes in `directory` to an engine that answers, or to a checkpointed one if it had a GPU. Raises StepFailed."""
    cabinet, began = local.site.images, time.monotonic()
    held = await holder(
        local,
        lambda: local.holder.restore(
            cabinet.criu.path, directory, pid=manifest.pid, place=manifest.place, deadline_s=deadline_s, parked=True
        ),
    )
    assert held.engine is not None
    local.watch("engine", held.engine)
    kind, assigned = manifest.fingerprint.engine.partition(" ")[0], local.shelved
    assert assigned is not None, "prepared before"
    local.directory.edit(
        kind=kind, left_device=manifest.gpu or None, skeleton_bytes=manifest.skeleton_bytes,
        **pretence(kind, assigned.model.spec.arguments),
    )  # fmt: skip
    if manifest.gpu is not None:
        local.engine_state = None
        local.note(engine=EngineState.CHECKPOINTED, attached=None, awake=False, checked=False, woken_for=None, verified=True)
        return
    await checkpoint.release(local, deadline_s - (time.monotonic() - began))
    state = local.engine_state
    assert state is not None
    local.directory.edit(skeleton_bytes=max(state.bytes_private, manifest.skeleton_bytes))


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
