"""Host memory that copies run from: sets mapped once and pinned in spare time, for every device of this process."""

import asyncio
import functools
import logging

from pool.arena import Arena
from pool.lane import Lane, Turn
from pool.manifest import Manifest
from pool.slabs import Slab, Slabs
from pool.wire import close_all

log = logging.getLogger("pool")


class HostSide:
    """lane: the one that pins; None where there is no device: then nothing is mapped, either."""

    def __init__(self, arena: Arena, lane: Lane | None) -> None:
        self._arena, self._lane = arena, lane
        self._slabs: dict[str, Slabs] = {}
        self._there: dict[str, dict[int, Slab]] = {}
        """Of sets that came in memory which was mapped, and pinned, before."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def registered_bytes(self) -> int:
        return sum(slabs.registered_bytes for slabs in self._slabs.values())

    def prepare(self, manifest: Manifest) -> None:
        """Map and pin a set ahead of need, whenever nobody waits for a device."""
        if self._lane is None:
            return
        task = asyncio.create_task(self._prepare(manifest), name=f"prepare {manifest.weight_set}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, manifest: Manifest) -> None:
        try:
            slabs = self.mapped(manifest)
        except OSError as error:
            log.warning("not_mapped", extra={"weight_set": manifest.weight_set, "why": str(error)})
            return
        begun = asyncio.get_running_loop().time()
        for part in list(slabs.parts):
            await self.pin(part)
        took_ms = (asyncio.get_running_loop().time() - begun) * 1000
        log.info("registered", extra={"weight_set": manifest.weight_set, "bytes": slabs.registered_bytes, "ms": took_ms})

    async def pin(self, slab: Slab) -> None:
        """All of it, for every device of this process, whenever nobody waits for one."""
        assert self._lane is not None
        while slab.to_pin:
            await self._lane.submit(Turn.SPARE, functools.partial(slab.pin, self._lane.gpu))

    async def unpin(self, slab: Slab | None) -> None:
        """Unpin and unmap, whenever nobody waits for a device. What the driver refuses to unpin stays until the daemon ends."""
        if slab is None:
            return
        assert self._lane is not None
        try:
            while not await self._lane.submit(Turn.SPARE, functools.partial(slab.give_up, self._lane.gpu)):
                pass
        except OSError as error:  # whoever gives up a set, or a spare, has more to give up
            log.error("not_unpinned", extra={"bytes": slab.size, "why": str(error)})

    def brought(self, weight_set: str, there: dict[int, Slab]) -> None:
        """A new set, some of whose segments are mapped already."""
        if there:
            self._there[weight_set] = there

    def mapped(self, manifest: Manifest) -> Slabs:
        """Raises OSError."""
        slabs = self._slabs.get(manifest.weight_set)
        if slabs is None:
            slabs = Slabs(manifest.weight_set)
            count = len(manifest.segments) - manifest.host_segments
            fds = self._arena.open(manifest)
            try:
                slabs.map(fds[:count], manifest.segments[:count], self._there.get(manifest.weight_set, {}))
            finally:
                close_all(fds)
            self._slabs[manifest.weight_set] = slabs
        return slabs

    def forget(self, weight_set: str) -> dict[int, Slab]:
        """The set leaves the host, and nobody holds it on a device; what is mapped of it is the caller's, by segment."""
        slabs = self._slabs.pop(weight_set, None)
        return self._there.pop(weight_set, {}) | (dict(enumerate(slabs.parts)) if slabs is not None else {})

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
