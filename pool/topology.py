"""How this machine's GPUs are joined: each one's link to host memory, who shares it, who reaches whom directly."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

LINK_BYTES_PER_S = 50e9
"""Of 16 lanes of the fifth generation, as copies reach it (measured: 51 to 55)."""
SYSFS = Path("/sys/bus/pci/devices")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's way to host memory."""

    device: str
    """UUID."""
    uplink: str
    """What it shares with every device of the same name: the last port below the root of the bus."""
    node: int | None = None
    """NUMA node that the uplink belongs to; None where the system does not tell."""
    bytes_per_s: float = LINK_BYTES_PER_S
    """Of the uplink, one way."""


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    places: tuple[Place, ...]
    peers: frozenset[tuple[str, str]] = frozenset()
    """(who writes, whose memory): directly, over NVLink."""

    def place(self, device: str) -> Place | None:
        return next((place for place in self.places if place.device == device), None)


NO_TOPOLOGY = Topology(places=())


def read_topology(bus_ids: Mapping[str, str], peers: Iterable[tuple[str, str]], *, sysfs: Path = SYSFS) -> Topology:
    """From sysfs. bus_ids: UUID -> `domain:bus:device.function`; peers: pairs that the driver lets write directly."""
    places = tuple(_place(device, bus_id, sysfs) for device, bus_id in bus_ids.items())
    return Topology(places=places, peers=frozenset(peers))


def _place(device: str, bus_id: str, sysfs: Path) -> Place:
    """A device right below a root has a link of its own; what hangs behind a bridge shares that bridge's way up."""
    path = sysfs / bus_id.lower()
    above = [part for part in os.path.realpath(path).split("/") if _is_function(part)][:-1]
    node: int | None = None
    with contextlib.suppress(OSError, ValueError):
        told = int((path / "numa_node").read_text())
        node = told if told >= 0 else None
    return Place(device=device, uplink=above[0] if above else bus_id.lower(), node=node)


def _is_function(part: str) -> bool:
    """`0000:17:00.0`, and not `pci0000:15`."""
    return len(part) >= len("0000:00:00.0") and part.count(":") == 2 and "." in part
