"""Memory made ready ahead of need, in spare time: touched, mapped and pinned where there are devices.

What leaves the pool is kept for what comes next, as far as the budget has room for it. Idle means idle: once all is ready
nothing runs here.
"""

import asyncio
import logging
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pool.arena import READY, Arena, Draft
from pool.devices import Devices
from pool.huge import allocate
from pool.manifest import Manifest, segment_name
from pool.placement import RESERVE_BYTES
from pool.slabs import Slab
from pool.spares import Make, Shed, Spare, adopted, least_wanted, matched, next_step
from pool.way import Way

CHUNK_BYTES = 8 << 20
"""Taken at once: some milliseconds, more where the kernel has to move pages for huge ones; a wake may have to wait for it."""
SETTLE_S = 1.0
"""After the last change: what comes in a row is not disturbed."""
log = logging.getLogger("pool")


class Ready:
    """Books in the event loop's thread. `allowed`: bytes that may lie ready at the moment, by limit, budget and host."""

    def __init__(self, arena: Arena, devices: Devices, way: Way, allowed: Callable[[], int]) -> None:
        self._arena, self._devices, self._way, self._allowed = arena, devices, way, allowed
        self._wanted: tuple[int, ...] = ()
        self._planned: tuple[int | None, ...] = ()
        """Memory nodes of the sizes that are wanted."""
        self._spares: list[Spare] = []
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "pool-ready", initializer=_yield_to_others)
        self._task: asyncio.Task[None] | None = None
        self._longest_s = 0.0
        """The longest that the host took for one chunk."""

    @property
    def size_bytes(self) -> int:
        return sum(spare.size for spare in self._spares)

    @property
    def node_bytes(self) -> Counter[int | None]:
        """Memory node -> bytes that lie ready there."""
        found = Counter[int | None]()
        for spare in self._spares:
            found[spare.node] += spare.size
        return found

    @property
    def pinned_bytes(self) -> int:
        return sum(spare.slab.pinned for spare in self._spares if spare.slab is not None)

    def start(self, wanted: Sequence[int]) -> None:
        """Take over what an earlier daemon had ready. wanted: sizes that are likely to be asked for."""
        if (self._arena.root / READY).is_dir():
            left = sorted((self._arena.root / READY).iterdir())
            self._spares = [spare for path in left if (spare := adopted(path, self._arena.nodes))]
        self._wanted = tuple(wanted)
        self._task = asyncio.create_task(self._run(), name="make memory ready")
        self._changed.set()

    async def close(self) -> None:
        """Nothing stays."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown()
        for spare in self._spares:
            os.close(spare.fd)
        await asyncio.to_thread(shutil.rmtree, self._arena.root / READY, True)

    # ---- for sets that come and go --------------------------------------------------------------------------

    async def claim(self, sizes: tuple[int, ...], planned: tuple[int | None, ...] = (), *, free_bytes: int) -> dict[int, Spare]:
        """Segment -> memory for it. What stays ready leaves room in the budget (`free_bytes`) and on the host for the rest.

        planned: the memory node that each shall lie on.
        """
        self._wanted, self._planned = sizes, planned
        found = matched(self._spares, sizes, planned)
        for spare in found.values():
            self._spares.remove(spare)
        try:
            anywhere = None in planned or not planned
            near = {*planned, None}
            for far in [one for one in self._spares if not anywhere and one.size in sizes and one.node not in near]:
                await self._shed(far)  # it would count as what is wanted, and be refused each time
            fresh = Counter[int | None]()
            for number in set(range(len(sizes))).difference(found):
                fresh[planned[number] if planned else None] += sizes[number]
            await self._make_way(fresh, free_bytes)
        except BaseException:
            self._spares += found.values()  # else nobody would know of them
            raise
        self._changed.set()
        return found

    async def _make_way(self, fresh: Counter[int | None], free_bytes: int) -> None:
        """fresh: memory node -> bytes that are to come from it, or from any (None). On each what lies ready makes way for them:
        that is how they were planned. The host's room and the budget have no nodes."""
        if any(node is not None for node in fresh):
            nodes = await asyncio.to_thread(self._arena.nodes.nodes)
            left = {node.number: node.free_bytes - RESERVE_BYTES for node in nodes}
            for spare in sorted(self._spares, key=lambda spare: -spare.size):
                if spare.node in left and left[spare.node] < fresh[spare.node]:
                    await self._shed(spare)
                    left[spare.node] += spare.size
        while self._spares and (self.size_bytes > free_bytes or fresh.total() > await asyncio.to_thread(self._arena.room)):
            # By now another staging may have claimed all that was left.
            largest = max(self._spares, key=lambda spare: (fresh[spare.node] > 0, spare.size), default=None)
            if largest is not None:
                await self._shed(largest)

    async def take_back(self, draft: Draft) -> None:
        """The draft comes to nothing: its memory does not, but for what is sealed or can't be moved, which goes with it."""
        going = list[Slab | None]()
        for number, spare in draft.spares.items():
            if spare.path.parent == draft.path and (draft.fds[number] < 0 or not self._moved(spare)):
                going.append(spare.slab)  # its descriptor is the draft's still, if there is one
                continue
            draft.fds[number] = -1
            self._spares.append(spare)
        draft.spares = {}
        self._changed.set()
        for slab in going:
            await self._devices.host.unpin(slab)

    async def recycle(self, grave: Path, of: Manifest, slabs: dict[int, Slab]) -> None:
        """A set has left: keep of its memory what there is room for; the rest is unpinned and goes with the grave."""
        for number, size in enumerate(of.segments):
            node = of.nodes[number] if of.nodes else None
            spare = Spare(grave / segment_name(number), -1, size, dirty=True, slab=slabs.get(number), node=node)
            if (spare.slab is not None or not self._devices) and self._fits(size) and self._moved(spare):
                self._spares.append(spare)
            else:
                await self._devices.host.unpin(spare.slab)
        if not self._wanted:
            self._wanted = of.segments
        self._changed.set()

    def _fits(self, size: int) -> bool:
        try:
            return self.size_bytes + size <= self._allowed()
        except OSError:  # nobody can look how much the host has
            return False

    def _moved(self, spare: Spare) -> bool:
        """To what lies ready; False: it can't be had, and all is as it was. It is opened if it is not."""
        try:
            spare.lie_ready(self._path())
        except OSError as error:
            log.warning("not_kept", extra={"bytes": spare.size, "why": str(error)})
            return False
        return True

    # ---- in spare time --------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await asyncio.sleep(SETTLE_S)
            try:
                while await self._step():
                    pass
            except OSError as error:  # the host has no more: the next change asks again
                log.warning("not_ready", extra={"why": str(error)})
            except Exception:  # a device that can't pin, or a fault of ours: ended, this would be silent for good
                log.exception("not_ready")
            longest_ms, self._longest_s = self._longest_s * 1000, 0.0
            log.info("ready_ahead", extra={"bytes": self.size_bytes, "pinned": self.pinned_bytes, "longest_ms": longest_ms})

    async def _step(self) -> bool:
        """One piece of work; False: nothing is left to do."""
        await self._way.clear()
        if (unpinned := next((one for one in self._spares if self._devices and one.to_pin), None)) is not None:
            if unpinned.slab is None:
                unpinned.slab = Slab.over(unpinned.fd, unpinned.size)
            await self._devices.host.pin(unpinned.slab)
            return True
        match next_step([spare.size for spare in self._spares], self._wanted, self._allowed()):
            case Make(size_bytes=size):
                await self._make(size)
            case Shed(size_bytes=size):
                await self._shed(least_wanted(self._spares, size, self._wanted, self._planned))
            case None:
                return False
        return True

    async def _make(self, size: int) -> None:
        path = self._path()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        loop = asyncio.get_running_loop()
        chunk: asyncio.Future[Any] | None = None
        try:
            self._arena.nodes.prefer(fd, size, self._node_for(size))
            for at in range(0, size, CHUNK_BYTES):
                await self._way.clear()
                begun = time.monotonic()
                chunk = loop.run_in_executor(self._thread, allocate, fd, at, min(CHUNK_BYTES, size - at))
                await asyncio.shield(chunk)
                self._longest_s = max(self._longest_s, time.monotonic() - begun)
            chunk = loop.run_in_executor(self._thread, self._arena.nodes.found, [fd], [size])
            found = await asyncio.shield(chunk)
        except BaseException:
            if chunk is not None:
                await asyncio.wait([chunk])  # the descriptor's number may be another file's as soon as it is closed
            os.close(fd)
            path.unlink()
            raise
        self._spares.append(Spare(path, fd, size, dirty=False, node=found[0] if found else None))

    def _node_for(self, size: int) -> int | None:
        """Of the segments of this size that are wanted, where the next one is missing."""
        there = Counter(spare.node for spare in self._spares if spare.size == size)
        planned = [node for each, node in zip(self._wanted, self._planned, strict=False) if each == size]
        return next((node for node, count in Counter(planned).items() if there[node] < count), None)

    async def _shed(self, spare: Spare) -> None:
        if spare not in self._spares:  # somebody has claimed it since it was chosen
            return
        self._spares.remove(spare)
        try:
            await self._devices.host.unpin(spare.slab)
        finally:  # it is in no books any more
            os.close(spare.fd)
            await asyncio.to_thread(spare.path.unlink)

    def _path(self) -> Path:
        directory = self._arena.root / READY
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory / secrets.token_hex(8)


def _yield_to_others() -> None:
    """Linux: a thread has a niceness of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
