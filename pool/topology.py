"""How this machine's GPUs are joined: each one's link to host memory, who shares it, who reaches whom directly."""

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

LINK_BYTES_PER_S = 50e9
"""Of 16 lanes of the fifth generation, as copies reach it (measured: 51 to 55)."""
_LINK = (5, 16)
"""Its generation and lanes."""
_OLDEST = 3
"""Generation of the slowest link that is believed: what a guest's virtual port says of itself is older."""
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

    def bytes_per_s(self, device: str) -> float:
        """Of its link, one way."""
        place = self.place(device)
        return place.bytes_per_s if place is not None else LINK_BYTES_PER_S


NO_TOPOLOGY = Topology(places=())


def link_bytes_per_s(generation: int, lanes: int) -> float:
    """What copies reach over such a link, one way: each generation from the third on doubles it, each lane adds as much."""
    if generation < _OLDEST or lanes < 1:
        return LINK_BYTES_PER_S
    return LINK_BYTES_PER_S * 2.0 ** (generation - _LINK[0]) * min(lanes, _LINK[1]) / _LINK[1]


def read_topology(
    bus_ids: Mapping[str, str],
    peers: Iterable[tuple[str, str]],
    links: Mapping[str, tuple[int, int]] | None = None,
    *,
    sysfs: Path = SYSFS,
) -> Topology:
    """From sysfs. bus_ids: UUID -> `domain:bus:device.function`; peers: pairs that the driver lets write directly; links: UUID
    -> generation and lanes, of those whose driver tells."""
    rates = {device: link_bytes_per_s(*link) for device, link in (links or {}).items()}
    places = tuple(
        msgspec.structs.replace(_place(device, bus_id, sysfs), bytes_per_s=rates.get(device, LINK_BYTES_PER_S))
        for device, bus_id in bus_ids.items()
    )
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
