"""Comparing sets with their digests: because somebody asks, and of adopted sets whenever there is time."""

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from pool.arena import Arena
from pool.manifest import Manifest
from pool.messages import Verified
from pool.residency import Residency
from pool.stage import Progress, bad_tensors
from pool.talk import send, talking
from pool.wire import AsyncChannel, close_all

log = logging.getLogger("pool")


class Checks:
    """`remove` is called for a set that is corrupt and that nobody holds."""

    def __init__(self, arena: Arena, residency: Residency, remove: Callable[[str], Awaitable[object]]) -> None:
        self._arena, self._residency, self._remove = arena, residency, remove
        self._thread = ThreadPoolExecutor(1, "pool-checker", initializer=_yield_to_others)

    def close(self) -> None:
        self._thread.shutdown()

    async def verify(self, channel: AsyncChannel, weight_set: str) -> None:
        manifest, edition = self._residency.find(weight_set).manifest, self._residency.edition(weight_set)
        progress = Progress()
        checking = asyncio.ensure_future(asyncio.to_thread(self._compare, manifest, progress))
        try:
            bad = await talking(channel, checking, progress)
        except BaseException:
            progress.cancel()
            await asyncio.wait([checking])
            raise
        await self._condemn(weight_set, bad, edition)
        await send(channel, Verified(weight_set=weight_set, bad=bad))

    async def all(self, manifests: list[Manifest]) -> None:
        """One after the other, at the lowest priority."""
        for manifest in manifests:
            progress, edition = Progress(), self._residency.edition(manifest.weight_set)
            try:
                bad = await asyncio.get_running_loop().run_in_executor(self._thread, self._compare, manifest, progress)
                await self._condemn(manifest.weight_set, bad, edition)
            except asyncio.CancelledError:
                progress.cancel()
                raise
            except FileNotFoundError:  # dropped before its turn came
                continue
            except Exception:
                log.exception("check_failed", extra={"weight_set": manifest.weight_set})
        log.info("checked", extra={"sets": len(manifests)})

    def _compare(self, manifest: Manifest, progress: Progress) -> tuple[str, ...]:
        progress.total_bytes = sum(tensor.size_bytes for tensor in manifest.tensors)
        fds = self._arena.open(manifest)
        try:
            return bad_tensors(fds, manifest.tensors, progress)
        finally:
            close_all(fds)

    async def _condemn(self, weight_set: str, bad: tuple[str, ...], edition: object) -> None:
        if not bad:
            return
        log.error("corrupt", extra={"weight_set": weight_set, "bad": bad})
        if self._residency.condemn(weight_set, bad, edition):
            await self._remove(weight_set)


def _yield_to_others() -> None:
    """Linux: a thread has a niceness of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
