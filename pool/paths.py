"""Over which links a weight set travels to a device: a pure function of topology and load.

1. its own link, always;
2. the links of devices that reach it directly (NVLink), have a link of their own (no uplink twice), are not copying for
   themselves, and have room for a ring; those of its own NUMA node first;
3. each takes a share by its rate. One that decodes takes what costs it less than 5 %, and is left out below a tenth.
A small set goes by its own link alone: a ring has to be filled before anything arrives.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import inf

import msgspec

from pool.topology import Place, Topology

PIECE_BYTES = 32 << 20
"""One copy, and one buffer of a ring: from 16 MiB on two hops at once reach 99 % of two links (measured with 16 to 256)."""
RING_BUFFERS = 4
RING_BYTES = PIECE_BYTES * RING_BUFFERS
"""Per helper and transfer: all the memory that helping costs."""
SMALLEST_BYTES = 256 << 20
"""Below it a second link saves less than 2.5 ms, and a ring costs one."""
SMALLEST_PIECE = 8 << 20
"""Smaller ones go by the direct link: a copy reaches full speed from here on."""
MOST_HELPERS = 3
"""Four links take 200 GB/s out of host memory, which is what one socket gives."""
LOSS_LIMIT = 0.05
_LEAST_SHARE = 0.1


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a device is doing at the moment."""

    free_bytes: int
    copying: bool = False
    """Its link is in use, for itself or for another."""
    decoding: bool = False
    loss: float = 0.08
    """Of its decoding, while it helps at full rate. H200s, bound by their memory, lost 4.0 and 5.2 % so, and one 5.5 % at 0.83
    of it: with this it is given 0.63, and loses 3.6 %."""


class Path(msgspec.Struct, frozen=True, kw_only=True):
    via: str | None
    """The helper's UUID; None: the device's own link."""
    share: float
    """Of the bytes; all shares make 1."""


def candidates(target: str, size_bytes: int, topology: Topology) -> list[Place]:
    """Who can help, if what it does allows that: those first that are wanted first."""
    own = topology.place(target)
    if own is None or size_bytes < SMALLEST_BYTES:
        return []
    able = [
        place
        for place in topology.places
        if place.uplink != own.uplink and place.device != target and (place.device, target) in topology.peers
    ]
    return sorted(able, key=lambda place: (place.node != own.node, place.device))


def choose(
    target: str, size_bytes: int, topology: Topology, loads: Mapping[str, Load], *, reserve_bytes: int
) -> tuple[Path, ...]:
    """The direct path first. reserve_bytes: what a helper keeps free beside its ring."""
    own = topology.place(target)
    node = own.node if own is not None else None
    rates: list[tuple[str | None, float]] = [(None, topology.bytes_per_s(target))]
    taken: set[str] = set()
    able = [(place, load) for place in candidates(target, size_bytes, topology) if (load := loads.get(place.device))]
    for place, load in sorted(able, key=lambda one: (one[0].node != node, one[1].decoding)):
        if len(rates) > MOST_HELPERS or place.uplink in taken or not _may_help(load, reserve_bytes):
            continue
        if (part := _bearable(load)) >= _LEAST_SHARE:
            rates.append((place.device, place.bytes_per_s * part))
            taken.add(place.uplink)
    total = sum(rate for _, rate in rates)
    return tuple(Path(via=via, share=rate / total) for via, rate in rates)


def enough(paths: Sequence[Path], loads: Mapping[str, Load]) -> bool:
    """Whether nobody else, whatever it does, could take the place of one of those that were chosen by these loads."""
    return len(paths) > MOST_HELPERS and not any(loads[path.via].decoding for path in paths if path.via is not None)


def _may_help(load: Load, reserve_bytes: int) -> bool:
    return not load.copying and load.free_bytes >= RING_BYTES + reserve_bytes


def _bearable(load: Load) -> float:
    """The part of its link's rate at which its decoding loses no more than the limit."""
    return min(1.0, LOSS_LIMIT / load.loss) if load.decoding and load.loss > 0 else 1.0


def pieces(size_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and size of what single copies move: cut at multiples of a piece."""
    for at in range(0, size_bytes, PIECE_BYTES):
        yield at, min(PIECE_BYTES, size_bytes - at)


class Dealer:
    """Gives each piece to the path that is furthest behind its share, so that all are busy from the first to the last."""

    def __init__(self, shares: Sequence[float]) -> None:
        total = sum(shares)
        self._shares = [share / total for share in shares]
        self.dealt = [0] * len(shares)
        """Bytes, per path."""

    def deal(self, size_bytes: int) -> int:
        """The number of the path that takes the next piece."""
        if size_bytes < SMALLEST_PIECE:
            number = 0
        else:
            done = sum(self.dealt) + size_bytes
            behind = [share * done - dealt if share else -inf for share, dealt in zip(self._shares, self.dealt, strict=True)]
            number = behind.index(max(behind))
        self.dealt[number] += size_bytes
        return number

    def leave_out(self, number: int) -> None:
        """No more for this path: the others share what is to come. Twice is fine."""
        self._shares[number] = 0.0
        total = sum(self._shares)
        self._shares = [share / total for share in self._shares]

    def take_over(self, number: int, size_bytes: int) -> None:
        """A piece that this path had goes by the first one."""
        self.dealt[number] -= size_bytes
        self.dealt[0] += size_bytes
