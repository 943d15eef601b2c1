"""What one connection holds: sets on the host, sets on devices. All of it goes when the connection does."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from pool.blocks import Groups
from pool.device import Resident
from pool.devices import Devices
from pool.manifest import Manifest
from pool.messages import Released
from pool.residency import Refused, Residency

log = logging.getLogger("pool")


class References:
    """`remove` is called for a set that is corrupt and that nobody holds any more. process: whose connection it is."""

    def __init__(
        self, residency: Residency, devices: Devices, remove: Callable[[str], Awaitable[object]], *, process: int = 0
    ) -> None:
        self._residency, self._devices, self._remove, self._process = residency, devices, remove, process
        self._host: Counter[str] = Counter()
        self._on_device: dict[tuple[str, str], list[Resident]] = {}
        self._left: list[tuple[Manifest, str, Mapping[str, int]]] = []

    def hold(self, weight_set: str) -> Manifest:
        manifest = self._residency.hold(weight_set)
        self._host[weight_set] += 1
        return manifest

    async def hold_on(
        self, manifest: Manifest, device: str, *, beside: tuple[str, ...] = (), neighbours: Groups | None = ()
    ) -> Resident:
        resident = await self._devices.hold(manifest, device, beside=beside, neighbours=neighbours)
        self._on_device.setdefault((manifest.weight_set, device), []).append(resident)
        self._devices.uses(self._process, device, 1)
        return resident

    async def exchange(self, manifest: Manifest, device: str, over: str) -> Resident:
        """The host's reference to the new set is taken already. Raises Refused; then this connection holds what it held."""
        held = self._on_device.get((over, device), [])
        if len(held) != 1 or self._residency.find(over).manifest.layout_digest != manifest.layout_digest:
            raise Refused("not_in_place", f"{over[:64]} is not held once by this connection on {device[:64]}, in that layout")
        self._devices.uses(self._process, device, -1)  # it rests while its weights come, whatever it did a moment ago
        try:
            resident = await self._devices.exchange(manifest, device, held[0])
        finally:
            self._devices.uses(self._process, device, 1)
        held.pop()
        self._on_device.setdefault((manifest.weight_set, device), []).append(resident)
        await self._let_go(over)
        return resident

    def left(self, manifest: Manifest, device: str, copies: Mapping[str, int]) -> None:
        """On a device, put there by a daemon before this one."""
        self._devices.left(manifest, device, copies, 1)
        self._devices.uses(self._process, device, 1)
        self._left.append((manifest, device, copies))

    async def release(self, weight_set: str, device: str | None) -> Released:
        """Raises Refused (`unknown_set`) when this connection does not hold it."""
        if device is not None:
            held = self._on_device.get((weight_set, device), [])
            if not held:
                raise Refused("unknown_set", f"this connection does not hold {weight_set[:64]} on {device[:64]}")
            self._devices.uses(self._process, device, -1)
            released = await self._devices.release(weight_set, device, held.pop())
            await self._let_go(weight_set)
            return released
        if not self._host[weight_set]:
            raise Refused("unknown_set", f"this connection does not hold {weight_set[:64]}")
        await self._let_go(weight_set)
        return Released(freed_bytes=0, took_ms=0)

    async def _let_go(self, weight_set: str) -> None:
        self._host[weight_set] -= 1
        if self._residency.release(weight_set):
            await self._remove(weight_set)

    async def close(self) -> None:
        for (weight_set, device), held in self._on_device.items():
            while held:
                self._devices.uses(self._process, device, -1)
                try:
                    await self._devices.release(weight_set, device, held.pop())
                except OSError as error:  # a device that is lost; all else that is held goes
                    log.warning("not_freed", extra={"weight_set": weight_set, "device": device, "why": str(error)})
        for manifest, device, copies in self._left:
            self._devices.left(manifest, device, copies, -1)
            self._devices.uses(self._process, device, -1)
        for weight_set in list(self._host):
            while self._host[weight_set]:
                await self._let_go(weight_set)
