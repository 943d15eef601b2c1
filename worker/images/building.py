"""An image is built: the engine goes to disk and is proved to come back from there.

What needs the disk alone goes on beside what needs the engine: zeros leave the disk and all is synced while the proof is
given, and digests are made while the driver brings the engine back. Nothing is published before all that is through.
"""

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from controlplane.fleet import DISK_FULL, ENGINE_OUTDATED
from controlplane.quantities import need_and_limit
from worker import checkpoint, parked
from worker.desired import Wanted
from worker.failure import FULL, StepFailed
from worker.holdermessages import Held
from worker.images import bulk, facts
from worker.images.beside import Beside, to_its_end
from worker.images.budget import NoRoom
from worker.images.fingerprint import Fingerprint, MappedFile, outdated
from worker.images.manifest import Manifest
from worker.images.proving import back_on_gpu, prove, returned
from worker.images.steps import OUR_SHARE, seek
from worker.instancedir import Record
from worker.ledge import stays_unsaved
from worker.local import LocalInstance
from worker.moves import EngineState, Goal
from worker.parts import Parts

ROOM: Final = 1.25
"""Times the engine's own memory must be free on disk: a dump has some percent more than that, zeros included (they leave it
afterwards), and the disk is others' too."""
FULL_BYTES: Final = 1 << 20
"""A disk with less than this left is full: CRIU writes in larger pieces."""
NO_SPACE: Final = tuple(map(os.strerror, FULL))
"""As CRIU says it."""

ELSEWHERE: Final = frozenset(
    {"no_memory", "no_release", "no_device_memory", "device_full", "device_silent", "unknown_set", "pool", "pool_away"}
)
"""Failures of a build that say nothing of the image, nor of any that is built next: no room to prove it in, or no weights."""

log = structlog.get_logger("images")


async def build(local: LocalInstance, goal: Goal, wanted: Wanted, parts: Parts) -> tuple[int, str]:
    """Write the engine to disk and prove it: restored once, the known answer given, asleep again. Raises StepFailed.

    Skeletons of one configuration have one image, so they take turns, and what the first has written serves the next.
    """
    cabinet = local.site.images
    fingerprint = cabinet.fingerprint(wanted.configuration, local.record.kind)
    if why := outdated(local.record.started, fingerprint):  # by now: what its proof needs may have been staged for minutes
        raise StepFailed(ENGINE_OUTDATED, f"{why}: stop it and load it again")
    writing = cabinet.writing(fingerprint.image)
    waits = writing.locked()
    async with writing:
        if waits:
            await seek(local, wanted)
            if local.seen.kept is not None:
                return 0, ""
        return await _built(local, goal, wanted, fingerprint, parts)


async def _built(local: LocalInstance, goal: Goal, wanted: Wanted, fingerprint: Fingerprint, parts: Parts) -> tuple[int, str]:
    cabinet, began, image = local.site.images, time.monotonic(), fingerprint.image
    try:
        async with Beside(parts) as beside:
            made = await _dumped(local, image, wanted, beside)
            pid = made.held.inner_pid
            manifest = Manifest(
                image=image, fingerprint=fingerprint, mapped=made.mapped, files=(), gpu=made.gpu, pid=pid,
                place=made.held.park_in, skeleton_bytes=local.record.skeleton_bytes, proof="",
                made_ms=time.time_ns() // 1_000_000,
            )  # fmt: skip
            hollowing = beside.begin("holes", lambda: bulk.hollow(made.draft, pid, made.lifted))
            syncing = beside.begin("sync", lambda: cabinet.store.sync(image), after=hollowing)
            async with returned(local, manifest, parts) as coming:  # threads for the digests: not beside those that fill memory
                describing = beside.begin("digests", lambda: cabinet.store.describe(image), after=hollowing)
                proof = await prove(local, goal, wanted, manifest, coming, parts=parts)
            with parts.of("disk_wait"):
                await asyncio.shield(syncing)
                files, zero_bytes = await asyncio.shield(describing), hollowing.result()
        took_ms = round((time.monotonic() - began) * 1000)
        with parts.of("publish"):
            manifest = replace(manifest, files=files, zero_bytes=zero_bytes, proof=proof, took_ms=took_ms)
            whole = await to_its_end(lambda: cabinet.publish(manifest))
    except OSError as error:
        code = "no_space" if error.errno in FULL else "image_failed"
        kept = code == "no_space" and stays_unsaved(wanted) and local.watched("engine")
        if code != "no_space":  # which is the disk's fault, whenever it runs full
            await _give_up(local, image, wanted, code, str(error))
        raise StepFailed(code if kept else "image_failed", f"the image can't be written: {error}") from error
    except StepFailed as failure:
        if failure.code in DISK_FULL | ELSEWHERE:  # the image may be as good as any
            await to_its_end(lambda: cabinet.store.discard(image))
        else:
            await _give_up(local, image, wanted, failure.code, failure.message)
        raise
    finally:
        await to_its_end(lambda: cabinet.store.discard(image))  # published, it is none any more; else its time has passed
    local.note(kept=whole.image, sought=True)
    log.info("image_parts_ms", instance=local.instance, image=image, whole=took_ms, **parts.rounded())
    return whole.size_bytes, ""


class Dumped(Struct, frozen=True):
    """An engine on disk."""

    held: Held
    """Who it was."""
    mapped: tuple[MappedFile, ...]
    gpu: str | None
    """That it was taken off first."""
    draft: Path
    lifted: bulk.Lifted


async def _dumped(local: LocalInstance, image: str, wanted: Wanted, beside: Beside) -> Dumped:
    """The engine is gone afterwards. Raises StepFailed (`no_space`, `over_quota`, `dump_failed`, ...); after the first two the
    engine sleeps as before, if it is to stay (`stays_unsaved`).
    """
    cabinet, parts = local.site.images, beside.parts
    if local.record.ranks:
        raise StepFailed("not_available", "a gang's ranks can't be written to disk")
    draft = await to_its_end(lambda: cabinet.store.draft(image))
    try:
        with parts.of("room"):
            await asyncio.to_thread(cabinet.make_room, room_bytes(local.record))
    except NoRoom as full:
        raise StepFailed(full.code, full.message) from full
    held = await parked.asked(local, local.holder.ask)
    if held.engine is None or held.exit is not None:
        raise StepFailed("engine_died", "there is no engine to be saved")
    gpu, was_off = None, False
    if checkpoint.theatre(local) is not None:
        was_off = local.seen.engine is EngineState.CHECKPOINTED
        if not was_off:
            await checkpoint.take_off(local, parts)
        gpu = local.record.left_device or ""
    try:
        if gpu is not None and (open_still := facts.gpu_files(held.engine.pid)):
            raise StepFailed("gpu_files_open", f"off its GPU, the engine has files of the driver open still: {open_still}")
        paths = await asyncio.to_thread(facts.mapped_paths, held.engine.pid)
    except (FileNotFoundError, ProcessLookupError):
        raise StepFailed("engine_died", f"the engine (pid {held.engine.pid}) ended before it was saved") from None
    mapping = beside.begin("mapped", lambda: facts.mapped_files(paths))
    local.unwatch("engine")  # its end is meant
    deadline_s = local.site.deadlines.build * OUR_SHARE / 2
    try:
        with parts.of("dump"):
            await parked.asked(local, lambda: local.holder.dump(cabinet.criu.path, draft, deadline_s=deadline_s))
    except StepFailed as failure:
        free = _free(draft)
        says_so = any(said in failure.message for said in NO_SPACE)
        if failure.code == "no_space" or (failure.code == "dump_failed" and (free < FULL_BYTES or says_so)):  # taken meanwhile
            await to_its_end(lambda: cabinet.store.discard(image))
            if stays_unsaved(wanted):
                await _as_before(local, gpu, was_off=was_off)
            need, has = need_and_limit(room_bytes(local.record), free)
            log.warning("disk_ran_full", instance=local.instance, image=image, reason=failure.message)
            message = f"the disk ran full while an image of about {need} was written: {cabinet.store.root} had {has} left"
            raise StepFailed("no_space", message) from failure
        raise
    with parts.of("lift"):
        lifted = await to_its_end(lambda: bulk.lift(draft, held.inner_pid, local.directory.path))
    return Dumped(held, await asyncio.shield(mapping), gpu, draft, lifted)


def room_bytes(record: Record) -> int:
    """What its image is taken to need of the disk."""
    return round(record.skeleton_bytes * ROOM)


def _free(directory: Path) -> int:
    """Bytes. Where it has gone nothing ran full."""
    try:
        return shutil.disk_usage(directory).free
    except FileNotFoundError:
        return FULL_BYTES


async def _as_before(local: LocalInstance, gpu: str | None, *, was_off: bool) -> None:
    """After a dump that came to nothing CRIU lets the engine go on. Raises StepFailed if it doesn't."""
    held = await parked.asked(local, local.holder.ask)
    if held.engine is None or held.exit is not None:
        raise StepFailed("engine_died", "the engine did not outlive a dump that the disk had no room for")
    local.watch("engine", held.engine)
    if was_off:
        return
    if gpu is None:
        await parked.rejoined(local, held, local.site.deadlines.attach)
    else:  # parked still
        await back_on_gpu(local)


async def _give_up(local: LocalInstance, image: str, wanted: Wanted, code: str, message: str) -> None:
    cabinet = local.site.images
    await to_its_end(lambda: cabinet.store.discard(image))
    await asyncio.to_thread(cabinet.fail, image, wanted.configuration, "build", code, message, final=True)
