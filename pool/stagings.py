"""Stagings under way: one per source, however many ask for it; it ends when nobody waits any more."""

import asyncio
import errno
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from pool import stage
from pool.arena import Arena, Draft
from pool.devices import Devices
from pool.layout import Layout, gaps, lay_out, weight_set_id
from pool.manifest import Manifest, Origin
from pool.messages import Staged, Tensor
from pool.ready import Ready
from pool.residency import Refused, Residency
from pool.safetensors import BadSource, Source, read_source
from pool.sizes import written
from pool.way import Way

log = logging.getLogger("pool")
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT})


@dataclass
class Staging:
    task: asyncio.Task[Staged]
    progress: stage.Progress
    waiting: int = 0


@dataclass
class Stagings:
    arena: Arena
    residency: Residency
    devices: Devices
    ready: Ready
    way: Way
    _running: dict[str, Staging] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Staged]] = field(default_factory=set)
    drafts: set[Draft] = field(default_factory=set)
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a set gets its name, or loses it: it is looked at first, and files are renamed in other threads."""

    def join(self, source: str) -> Staging:
        """The staging of this source, begun if there is none; to be left by each who joins."""
        staging = self._running.get(source)
        if staging is None or staging.task.done() or not staging.waiting:  # one that nobody waits for is being cancelled
            progress = stage.Progress()
            task = asyncio.create_task(self._run(source, progress), name=f"stage {source}")
            staging = self._running[source] = Staging(task, progress)
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        staging.waiting += 1
        return staging

    def leave(self, staging: Staging) -> None:
        staging.waiting -= 1
        if not staging.waiting:
            staging.progress.cancel()
            self._running = {source: other for source, other in self._running.items() if other is not staging}

    async def close(self) -> None:
        """Cancel all and wait until no thread writes any more."""
        for staging in self._running.values():
            staging.progress.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Staged]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # those who wait have it from the task; it may be that nobody does

    async def _run(self, path: str, progress: stage.Progress) -> Staged:
        """Never cancelled as a task: `progress.cancel` is what ends it, so that threads are done when it is."""
        begun = time.monotonic()
        self.way.enter()
        try:
            source = await asyncio.to_thread(read_source, path)
            origin = Origin(path=source.path, files=source.files)
            if (known := self.residency.by_origin(origin)) is not None:
                return _staged(known.manifest, begun, 0)
            layout = await asyncio.to_thread(lay_out, source.entries)
            ticket = self.residency.admit(layout.size_bytes, await self.room())
            try:
                return await self._fill(source, origin, layout, progress, begun)
            finally:
                self.residency.settle(ticket)
        except BadSource as error:
            raise Refused("bad_source", str(error)) from error
        finally:
            self.way.leave()

    async def room(self) -> int:
        """Bytes that the host can give to a set, those that lie ready included."""
        return await asyncio.to_thread(self.arena.room) - self.missing() + self.ready.size_bytes

    async def begin(
        self, sizes: tuple[int, ...], covered: Iterable[tuple[int, int, int]], *, device: str | None = None
    ) -> Draft:
        """In memory that lies ready, as far as there is any. covered: (segment, offset, size) of each tensor. To be ended.

        device: on whose memory node it shall lie.
        """
        planned = self.arena.nodes.plan(sizes, device, self.ready.node_bytes)
        draft = self.arena.begin(sizes, gaps(sizes, covered))
        self.drafts.add(draft)
        try:
            unused = self.residency.budget_bytes - self.residency.used_bytes
            draft.use(await self.ready.claim(sizes, planned, free_bytes=unused), planned)
        except BaseException:
            await self.end(draft)
            raise
        return draft

    async def end(self, draft: Draft) -> None:
        """However it ended: what has not become a set is undone. Twice is fine."""
        self.drafts.discard(draft)
        if draft.path.exists():
            try:
                await self.ready.take_back(draft)
            finally:
                await asyncio.to_thread(draft.discard)

    def missing(self) -> int:
        """Promised to other stagings and not yet taken from the host."""
        return sum(draft.missing_bytes for draft in self.drafts)

    async def _fill(self, source: Source, origin: Origin, layout: Layout, progress: stage.Progress, begun: float) -> Staged:
        progress.total_bytes = sum(entry.size_bytes for entry in source.entries)
        covered = [(placed.segment, placed.offset, placed.entry.size_bytes) for placed in layout.tensors]
        draft = await self.begin(layout.segments, covered)
        try:
            tensors = await asyncio.to_thread(stage.copy, source, layout, draft, progress)
            manifest = await self.keep(draft, _manifest(layout, tensors, origin))
        except OSError as error:
            code = "no_room" if error.errno in _NO_ROOM else "failed"
            message = f"{source.path} could not be brought in, {written(layout.size_bytes)}: {error}"
            raise Refused(code, message, need_bytes=layout.size_bytes) from error
        finally:
            await self.end(draft)
        return _staged(manifest, begun, progress.done_bytes)

    async def keep(self, draft: Draft, manifest: Manifest) -> Manifest:
        """The draft becomes a set, or goes because there is one with these bytes."""
        async with self.keeping:
            known = self.residency.sets.get(manifest.weight_set)
            if known is not None and not known.bad:
                kept = self.residency.add_origin(manifest.weight_set, manifest.origins[0])
                self.arena.rewrite(kept)
                return kept
            manifest = msgspec.structs.replace(manifest, nodes=await asyncio.to_thread(draft.lies_on))
            await asyncio.to_thread(self.arena.publish, draft, manifest)
            log.info("placed", extra={"weight_set": manifest.weight_set, "nodes": manifest.node_bytes})
            if known is not None:
                await self.devices.replaced(manifest.weight_set)
            there = {number: spare.slab for number, spare in draft.spares.items() if spare.slab is not None}
            self.devices.host.brought(manifest.weight_set, there)
            draft.spares = {}
            self.residency.add(manifest)
            return manifest


def _manifest(layout: Layout, tensors: tuple[Tensor, ...], origin: Origin) -> Manifest:
    return Manifest(
        weight_set=weight_set_id(layout.digest, [tensor.digest for tensor in tensors]),
        layout_digest=layout.digest,
        segments=layout.segments,
        tensors=tensors,
        origins=(origin,),
    )


def _staged(manifest: Manifest, begun: float, read_bytes: int) -> Staged:
    took_ms = round((time.monotonic() - begun) * 1000)
    return Staged(weight_set=manifest.weight_set, size_bytes=manifest.size_bytes, took_ms=took_ms, read_bytes=read_bytes)
