"""How a set leaves the host's memory: because somebody asks and nobody has it, or because it is corrupt."""

import asyncio
import logging
import os
import shutil

from pool.mappers import mapping_processes
from pool.stagings import Stagings

log = logging.getLogger("pool")


class Removals:
    """Of the sets of these stagings' arena."""

    def __init__(self, stagings: Stagings) -> None:
        self._stagings = stagings
        self._arena, self._residency = stagings.arena, stagings.residency
        self._host, self._ready = stagings.devices.host, stagings.ready

    async def drop(self, weight_set: str) -> None:
        """Raises Refused: there is none, somebody has it, a process maps it, or it was staged again meanwhile."""
        self._residency.leave(weight_set)
        try:
            processes = await asyncio.to_thread(mapping_processes, self._arena.root / weight_set)
        except BaseException:
            self._residency.stay(weight_set, "stays")
            raise
        if others := [pid for pid in processes if pid != os.getpid()]:
            raise self._residency.stay(weight_set, f"is mapped by processes {', '.join(map(str, others))}")
        if not await self.remove(weight_set):
            raise self._residency.stay(weight_set, "was staged again meanwhile")

    async def remove(self, weight_set: str) -> bool:
        """False: it has gone already, or a sound copy has come meanwhile, and it stays."""
        begun = asyncio.get_running_loop().time()
        async with self._stagings.keeping:
            resident = self._residency.sets.get(weight_set)
            if resident is None or resident.holders or not (resident.bad or resident.leaving):
                return False
            grave = self._arena.bury(weight_set)
            self._residency.remove(weight_set)
            slabs = self._host.forget(weight_set)
        if resident.bad:  # its memory may be what is bad
            for slab in slabs.values():
                await self._host.unpin(slab)
        else:
            await self._ready.recycle(grave, resident.manifest, slabs)
        await asyncio.to_thread(shutil.rmtree, grave)
        took_ms = (asyncio.get_running_loop().time() - begun) * 1000
        log.info("removed", extra={"weight_set": weight_set, "ms": took_ms})
        return True
