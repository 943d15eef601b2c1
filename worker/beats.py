"""The worker's beat: once a second, and at once when progress has changed (at most ten a second). Nothing stores it."""

import asyncio
import contextlib
import time
from typing import Final

import structlog

from controlplane import subjects
from controlplane.bus import Bus
from controlplane.subjects import DeviceBytes, InstanceBeat, NodeBeat
from worker import checkpoint, hostmemory, ranks
from worker.local import LocalInstance
from worker.moves import EngineState
from worker.observe import measured
from worker.occupancy import used_bytes
from worker.reconcile import Reconciler
from worker.service import FrontendGone
from worker.shelf import Shelf
from worker.site import Site, now_ms

EVERY_S: Final = 1.0
SOONEST_S: Final = 0.1
WEIGH_S: Final = 10.0
"""Between two looks at what an engine off its device takes of the host: it stands still, and a look walks all its pages."""

log = structlog.get_logger("beats")


class Beats:
    """Collects and sends. What it measured last is sent again between two measurements."""

    def __init__(self, site: Site, bus: Bus, reconciler: Reconciler, shelf: Shelf, incarnation: str) -> None:
        self._site, self._bus, self._reconciler, self._shelf = site, bus, reconciler, shelf
        self._incarnation = incarnation
        self._instances: tuple[InstanceBeat, ...] = ()
        self._devices: dict[str, int] = {}
        self._owners: dict[str, DeviceBytes] = {}
        self._pool = (0, site.plane.pool_bytes, True)
        self._available = 0
        self._measured = asyncio.Event()

    async def run(self) -> None:
        """Beat until cancelled. A beat that can't be measured or sent is skipped: the next one comes in a second."""
        measuring = asyncio.create_task(self._measure_on(), name="measure")
        try:
            with contextlib.suppress(TimeoutError):  # the first beat is to say what there is
                async with asyncio.timeout(EVERY_S):
                    await self._measured.wait()
            while True:
                self._site.board.changed.clear()
                try:
                    await self._bus.publish(subjects.beat_node(self._site.plane.node), self.beat())
                except Exception:  # without a beat the plane takes the node for dead, though all of it serves
                    log.exception("not_beaten")
                await asyncio.sleep(SOONEST_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S - SOONEST_S):
                        await self._site.board.changed.wait()
        finally:
            measuring.cancel()

    def beat(self) -> NodeBeat:
        used, budget, ok = self._pool
        return NodeBeat(
            node=self._site.plane.node, incarnation=self._incarnation, at_ms=now_ms(), pool_used_bytes=used,
            pool_budget_bytes=budget, pool_ok=ok, device_bytes=self._devices, owners=self._owners, instances=self._instances,
            progress=self._site.board.shown, host_available_bytes=self._available,
        )  # fmt: skip

    async def _measure_on(self) -> None:
        while True:
            try:
                await self.measure()
            except Exception:
                log.exception("not_measured")
            self._measured.set()
            await asyncio.sleep(EVERY_S)

    async def measure(self) -> None:
        """Look at the pool, at each engine's memory and at each frontend's traffic."""
        described = await self._shelf.described()
        if described is None:
            self._pool = (self._pool[0], self._pool[1], False)
        else:
            self._pool = (described.used_bytes, described.budget_bytes, True)
            await self._site.stock.compare([known.weight_set for known in described.sets], time.monotonic())
        locals_ = [keeper.local for keeper in self._reconciler.keepers.values()]
        found = await asyncio.gather(*(self._instance(local) for local in locals_))
        devices = {known.device: 0 for known in self._site.plane.devices}
        for its, beat in found:
            for device in its:
                if device in devices:
                    devices[device] += beat.bytes_used // len(its)  # evenly, as the plane's ledger has it
        self._owners = await self._site.books.measure(described)
        self._available = await asyncio.to_thread(hostmemory.available_bytes)
        devices |= {device: owners.total for device, owners in self._owners.items()}
        self._devices, self._instances = devices, tuple(beat for _, beat in found)

    async def _instance(self, local: LocalInstance) -> tuple[tuple[str, ...], InstanceBeat]:
        running, rate, used = 0, 0.0, 0
        record = local.directory.read()
        off = local.seen.engine in (EngineState.DEAD, EngineState.CHECKPOINTED)
        if record is not None and record.engine is not None and not off:
            if self._site.is_gpu(record.device) and local.engine_state is not None:
                taken = await asyncio.to_thread(ranks.used_bytes, record)
                used = local.engine_state.bytes_mapped + (local.engine_state.bytes_private if taken is None else taken)
            elif record.kind == "fake" and local.engine_state is not None:
                used = used_bytes(local.engine_state)  # its sizes are scripted, like the declared devices that they are put on
            else:
                used = (await asyncio.to_thread(measured, record.engine.pid, self._site.data)).used
        if record is not None and local.seen.frontend:
            try:
                status = await local.frontend.status(record.port)
                running, rate = status.running, status.tokens_per_s
            except FrontendGone:
                pass  # its death is seen by whoever keeps it
        host = 0
        if local.seen.engine is EngineState.CHECKPOINTED:
            if time.monotonic() - local.weighed_s > WEIGH_S:
                await checkpoint.weigh(local)
            host = local.host_bytes
        beat = InstanceBeat(instance=local.instance, running=running, tokens_per_s=rate, bytes_used=used, host_bytes=host)
        return (record.devices if record else ()), beat
