"""What this machine offers to the plane: its devices and the memory for weights, from the settings or by default."""

import os
from collections.abc import Sequence
from typing import Final

import msgspec

from compose.directory import Directory
from compose.gpus import Found, look
from compose.refusal import EnvironmentRefusal
from controlplane.plane import PlaneDevice
from controlplane.quantities import human_bytes
from controlplane.settings import DeviceSettings, NodeSettings

DEFAULT_SHARE: Final = 4
"""Unless the settings say otherwise, one device and the pool take a quarter of the memory each: the half that is left is
for the operating system, the file cache and the engines' own working memory. Beside GPUs the pool takes half of it."""
_ROUND: Final = 64 << 20


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    devices: tuple[PlaneDevice, ...]
    pool_bytes: int
    deadlines: dict[str, float] = {}
    """As in `Plane`."""
    criu: str = ""
    image_quota_bytes: int = 0
    image_pins: tuple[str, ...] = ()
    checkpoint_bytes: int = 0
    pool_ready_bytes: int | None = None
    pool_helpers: bool = True
    pool_beside_decoding: float | None = None
    note: str = ""
    """What a person should know of it."""


def offer(settings: NodeSettings, directory: Directory) -> Offer:
    """Raises EnvironmentRefusal when it comes to more memory than the machine has."""
    memory = machine_bytes()
    share = memory // DEFAULT_SHARE // _ROUND * _ROUND
    found = look(settings.gpus)
    declared = settings.devices or (() if found.devices else (DeviceSettings(name="cpu0", size_bytes=share),))
    pool = share * (2 if found.devices else 1) if settings.pool_bytes is None else settings.pool_bytes
    need = pool + sum(device.size_bytes for device in declared)
    if need > memory:
        raise EnvironmentRefusal(
            "memory", f"Devices and pool come to {human_bytes(need)}; this machine has {human_bytes(memory)}.",
            "Declare smaller devices or a smaller pool_bytes in the settings' [node] table.",
        )  # fmt: skip
    if settings.pool_ready_bytes is not None and settings.pool_ready_bytes > pool:
        raise EnvironmentRefusal(
            "memory", f"{human_bytes(settings.pool_ready_bytes)} can't lie ready in a pool of {human_bytes(pool)}.",
            "Lower ready in the settings' [pool] table, or write a larger pool_bytes in [node].",
        )  # fmt: skip
    devices = found.devices + tuple(
        PlaneDevice(device=directory.device_uuid(one.name), name=one.name, kind="cpu", size_bytes=one.size_bytes)
        for one in declared
    )
    deadlines = {} if settings.drain_ms is None else {"drain": settings.drain_ms / 1000}
    return Offer(
        devices=devices, pool_bytes=pool, deadlines=deadlines, criu=settings.criu, note=_note(found),
        image_quota_bytes=settings.image_quota_bytes, image_pins=settings.image_pins,
        checkpoint_bytes=checkpoint_bytes(settings, pool, devices), pool_ready_bytes=settings.pool_ready_bytes,
        pool_helpers=settings.pool_helpers, pool_beside_decoding=settings.pool_beside_decoding,
    )  # fmt: skip


def machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def checkpoint_bytes(settings: NodeSettings, pool_bytes: int, devices: Sequence[PlaneDevice]) -> int:
    """Memory of the host that engines off their devices may take: what the settings say, else half of what is left beside
    pool and declared devices. Not of what is free at the moment: that would be another number after each start. What is
    really free is looked at before each checkpoint."""
    if settings.checkpoint_bytes is not None:
        return settings.checkpoint_bytes
    declared = sum(device.size_bytes for device in devices if device.kind == "cpu")
    return max(0, machine_bytes() - pool_bytes - declared) // 2 // _ROUND * _ROUND


def _note(found: Found) -> str:
    if not found.gpus or not found.missing:
        return ""
    return f"{len(found.gpus)} GPUs are not used: {found.missing} is missing; pip install 'enginehouse[gpu]'"
