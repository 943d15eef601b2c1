"""The device side: which sets are on which GPU, for how many connections. Memory goes with the last of them."""

import asyncio
import functools
import logging
import time
from collections.abc import Mapping, Sequence

from pool.arena import Arena
from pool.blocks import Groups, alone, cut, fitting, others
from pool.described import DeviceState
from pool.device import Device, Resident
from pool.fill import OnDevice, fill, free, refill
from pool.gpu import Gpu
from pool.habits import Habits
from pool.hostside import HostSide
from pool.lane import Lane, Turn
from pool.manifest import Manifest
from pool.messages import Filled, Released
from pool.pace import BESIDE_DECODING, FREE, pace_beside
from pool.residency import Refused
from pool.routes import Routes
from pool.slabs import Slabs
from pool.topology import NO_TOPOLOGY, Topology
from pool.way import Way
from pool.wire import close_all

DESCRIBE_S = 4.0
"""Less than who asks waits (`client.ANSWER_S`)."""
log = logging.getLogger("pool")


class Devices:
    """`gpus` may be empty: then there is nothing here, and every device is unknown."""

    def __init__(
        self,
        arena: Arena,
        way: Way,
        gpus: Sequence[Gpu] = (),
        topology: Topology = NO_TOPOLOGY,
        *,
        share: float = BESIDE_DECODING,
    ) -> None:
        """share: of a link's rate that a copy takes while a neighbour decodes."""
        self._way, self._topology, self._share = way, topology, share
        self._routes = Routes(gpus, topology)
        self._devices = {gpu.uuid: Device(Lane(gpu), gpu.total_bytes) for gpu in gpus}
        self._habits = Habits()
        self.host = HostSide(arena, next((device.lane for device in self._devices.values()), None))

    def __bool__(self) -> bool:
        return bool(self._devices)

    def __contains__(self, weight_set: str) -> bool:
        return any(weight_set in device.residents for device in self._devices.values())

    async def replaced(self, weight_set: str) -> None:
        """The set was corrupt and its files are other ones now: nobody else gets what was copied from the old ones."""
        for device in self._devices.values():
            if (resident := device.residents.pop(weight_set, None)) is not None:
                device.former.add(resident)
        travelling = [one.filled for device in self._devices.values() for one in device.former if one.weight_set == weight_set]
        if travelling:
            await asyncio.wait(travelling)  # copies run from the old mapping
        for slab in self.host.forget(weight_set).values():
            await self.host.unpin(slab)

    async def hold(
        self, manifest: Manifest, uuid: str, *, beside: tuple[str, ...] = (), neighbours: Groups | None = ()
    ) -> Resident:
        """One more reference. The set travels if it is not there. To be released, also when this or its futures fail.

        beside: devices that are filled at the same time and therefore don't help. neighbours: as in `Attach`; empty: it maps
        nothing now, and as the engines before had them is a good guess.
        Raises Refused (`unknown_device`, `bad_layout`); its `exported` and `filled` raise Refused (`device_full`, `bad_layout`)
        and OSError.
        """
        device = self._device(uuid)
        slabs = self.host.mapped(manifest)
        sizes = [part.size for part in slabs.parts]
        if neighbours is None:
            neighbours = alone(len(sizes))
        try:
            blocks = cut(neighbours or self._habits.guess(manifest.layout_digest), sizes)
        except ValueError as error:
            raise Refused("bad_layout", f"{manifest.weight_set}: {error}") from None
        if neighbours:
            self._habits.saw(manifest.layout_digest, neighbours)
        resident = device.residents.get(manifest.weight_set)
        if resident is None or resident.failed:
            resident = device.residents[manifest.weight_set] = self._send(device, slabs, blocks, beside=beside)
        elif len(shared := fitting(resident.made, neighbours)) < len(resident.made):
            resident = self._send_rest(device, slabs, resident, shared, neighbours, beside=beside)
        resident.holders += 1
        return resident

    async def exchange(self, manifest: Manifest, uuid: str, old: Resident) -> Resident:
        """The set of `manifest` into the memory of another one of its layout, which its only holder gives up with this.

        Raises Refused (`not_in_place`, `unknown_device`): then all is as it was.
        """
        device = self._device(uuid)
        slabs = self.host.mapped(manifest)
        if (why := device.holds_on_to(old, manifest.weight_set)) is not None:
            raise Refused("not_in_place", f"{manifest.weight_set} can't take the memory of {old.weight_set} on {uuid}: {why}")
        device.leave(old)
        old.holders = 0
        resident = device.residents[manifest.weight_set] = self._send(device, slabs, old.made, old.exported.result())
        resident.holders = 1
        return resident

    def _send_rest(
        self, device: Device, slabs: Slabs, base: Resident, shared: tuple[int, ...], neighbours: Groups,
        *, beside: tuple[str, ...],
    ) -> Resident:  # fmt: skip
        """What an engine can't map of the memory that others have, for it alone; of the rest there is one copy."""
        there = {number for which in shared for number in base.made[which]}
        resident = self._send(device, slabs, others(neighbours, [part.size for part in slabs.parts], there), beside=beside)
        if shared:
            resident.base, resident.shared = base, shared
            base.parts.append(resident)
            base.holders += 1
        device.former.add(resident)
        log.info("partly_shared", extra={"weight_set": base.weight_set, "own_bytes": resident.size_bytes})
        return resident

    def _send(
        self, device: Device, slabs: Slabs, blocks: Groups, made: OnDevice | None = None, *, beside: tuple[str, ...] = ()
    ) -> Resident:
        """made: memory of another set, in such blocks, that this one's bytes replace."""
        loop = asyncio.get_running_loop()
        exported: asyncio.Future[OnDevice] = loop.create_future()
        filled: asyncio.Future[Filled] = loop.create_future()
        asked = time.monotonic()
        size = slabs.bytes_of(blocks)
        if made is not None:
            exported.set_result(made)

        def tell(made: OnDevice) -> None:
            loop.call_soon_threadsafe(exported.set_result, made)

        beside_others = device.serves()
        rate = self._topology.bytes_per_s(device.lane.gpu.uuid)
        users = frozenset(device.users)

        def work() -> Filled:
            pace = pace_beside(device.lane.gpu, self._share, rate, users) if beside_others else FREE
            with self._routes.chosen(device.lane.gpu, size, beside=beside) as routes:
                if made is not None:
                    return refill(device.lane.gpu, slabs, made, routes, pace=pace)
                return fill(device.lane.gpu, slabs, blocks, tell, routes, making=device.making, pace=pace)

        def settle(done: asyncio.Future[Filled]) -> None:
            self._way.leave()
            if (error := done.exception()) is None:
                result = done.result()
                shards = {shard.via: shard.copied_bytes for shard in result.shards}
                waited = time.monotonic() - asked - result.took_ms / 1000
                log.info(
                    "filled",
                    extra={
                        "set": slabs.weight_set, "device": device.lane.gpu.uuid, "ms": result.took_ms, "waited_s": waited,
                        "links": shards, "blocks": len(blocks), "made_ms": result.made_ms, "made_ahead": result.made_ahead,
                        "longest_ms": result.longest_ms,
                    },
                )  # fmt: skip
                filled.set_result(result)
                return
            if exported.done():  # closed in this thread, which hands them out: a number may be another file's at once
                close_all(exported.result().fds)
                exported.result().fds.clear()
            for future in (exported, filled):
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # whoever waits has it from the future; it may be that nobody does

        self._way.enter()
        device.lane.submit(Turn.NOW, work).add_done_callback(settle)
        return Resident(slabs.weight_set, exported, filled, blocks, size_bytes=size)

    async def release(self, weight_set: str, uuid: str, resident: Resident) -> Released:
        """One reference less; answers once what nobody else has of its memory is free. Raises OSError for a block that did not
        go: all others went."""
        begun = time.monotonic()
        freed = await self._let_go(self._device(uuid), resident)
        return Released(freed_bytes=freed, took_ms=(time.monotonic() - begun) * 1000)

    async def _let_go(self, device: Device, resident: Resident) -> int:
        """Bytes that are free by that. Raises OSError."""
        resident.holders -= 1
        if resident.holders:
            return await self._bequeath(device, resident)
        await asyncio.wait([resident.filled])
        if resident.holders:  # somebody has come meanwhile
            return 0
        freed = 0
        try:
            if device.leave(resident):
                freed = await self._free(device, resident.exported.result())
        finally:
            if (base := resident.base) is not None:
                resident.base = None
                base.parts.remove(resident)
                freed += await self._let_go(device, base)
        return freed

    async def _bequeath(self, device: Device, base: Resident) -> int:
        """Once nobody but an engine that shares some of it has a copy: free what that engine can't map. Raises OSError."""
        if (heir := base.heir) is None:
            return 0
        await asyncio.wait([base.filled, heir.filled])
        if base.heir is not heir or base.failed or heir.failed:
            return 0
        return await self._free(device, device.bequeath(base, heir))

    async def _free(self, device: Device, made: OnDevice) -> int:
        return await device.lane.submit(Turn.NOW, functools.partial(free, device.lane.gpu, made))

    def left(self, manifest: Manifest, uuid: str, copies: Mapping[str, int], change: int) -> None:
        """An engine that maps what an earlier daemon put on a device has come (1) or gone (-1). copies: as in `Attach.left`."""
        if (device := self._devices.get(uuid)) is not None:
            whole = sum(manifest.segments[: len(manifest.segments) - manifest.host_segments])
            for copy, size in (copies or {manifest.weight_set: whole}).items():
                device.left[copy, size] += change

    def uses(self, process: int, uuid: str, change: int) -> None:
        """It has something more on a device (1), or less (-1)."""
        if (device := self._devices.get(uuid)) is not None:
            device.users[process] += change
            device.users = +device.users  # without those who have nothing left

    async def describe(self) -> tuple[DeviceState, ...]:
        """Raises Refused (`device_silent`)."""
        registered = self.host.registered_bytes
        return tuple(
            [
                device.state(await device.lane.answer(Turn.NOW, device.lane.gpu.free_bytes, DESCRIBE_S), registered)
                for device in list(self._devices.values())
            ]
        )

    async def close(self) -> None:
        """What engines map stays theirs; ours goes with the process."""
        await self.host.close()
        for device in self._devices.values():
            await device.lane.close()

    def _device(self, uuid: str) -> Device:
        device = self._devices.get(uuid)
        if device is None:
            known = ", ".join(self._devices) or "none"
            raise Refused("unknown_device", f"the pool daemon sees no device {uuid[:64]}; it sees {known}")
        return device
