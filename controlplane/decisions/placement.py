"""Slots: each device is a buddy tree over eight cells. Pure geometry; who holds what is read from the grants.

A block of 1, 2, 4 or 8 cells starts at a multiple of its size. Nothing is stored about free blocks: they are what the
grants leave over, so two freed halves are a whole again without anybody merging them.
"""

from collections.abc import Collection, Iterator, Mapping

import msgspec

from controlplane.fleet.state import Fleet
from controlplane.spec import CELLS

SHARES = (1, 2, 4, 8)
"""Sizes of the tree's nodes, in cells."""


class Slot(msgspec.Struct, frozen=True):
    """A node of one device's tree: `cells` cells from `offset` on."""

    device: str
    offset: int
    cells: int

    @property
    def mask(self) -> int:
        """One bit per cell, bit 0 for cell 0."""
        return mask(self.offset, self.cells)


def mask(offset: int, cells: int) -> int:
    return ((1 << cells) - 1) << offset


def smallest_share(need_bytes: int, device_bytes: int) -> int | None:
    """Cells of the smallest share of the device that holds `need_bytes`; None when even the whole is too small.

    Exact integers: a need of just 0.5, 0.25 or 0.125 of the device is a half, a quarter, an eighth.
    """
    return next((cells for cells in SHARES if need_bytes * CELLS <= cells * device_bytes), None)


def occupied(fleet: Fleet) -> dict[str, int]:
    """The held cells of every device as bit masks."""
    held = dict.fromkeys(fleet.devices, 0)
    for grant in fleet.grants.values():
        held[grant.device] = held.get(grant.device, 0) | mask(grant.offset, grant.cells)
    return held


def blocks(device: str, cells: int) -> Iterator[Slot]:
    """All nodes of that size in a device's tree."""
    return (Slot(device, offset, cells) for offset in range(0, CELLS, cells))


def buddy(slot: Slot, held: int) -> int:
    """Cells of the largest free node that contains the (free) slot: what taking the slot would break up."""
    size = slot.cells
    while size < CELLS and not held & mask(slot.offset // (2 * size) * 2 * size, 2 * size):
        size *= 2
    return size


def gang(fleet: Fleet, wanted: Collection[str], size: int, reserved: Mapping[str, int] | None = None) -> tuple[Slot, ...]:
    """Find `size` free whole devices of one node among those asked for.

    Returns: those of one island if there is one with enough of them, else of one node; of several the one with the fewest to
        spare, so that larger gangs keep theirs; ties by name. Empty when there are none.
    """
    held = occupied(fleet)
    free = [device for device in wanted if not held[device] | (reserved or {}).get(device, 0)]
    for together in (True, False):
        groups = [group for group in neighbours(fleet, free, together=together) if len(group) >= size]
        if groups:
            best = min(groups, key=lambda group: (len(group), [fleet.devices[device].name for device in group]))
            return tuple(Slot(device, 0, CELLS) for device in best[:size])
    return ()


def neighbours(fleet: Fleet, devices: Collection[str], *, together: bool) -> list[list[str]]:
    """The devices by node (`together`: by island, where any is known), each group in order of name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for device in sorted(devices, key=lambda device: (fleet.devices[device].name, device)):
        known = fleet.devices[device]
        if known.island or not together:
            groups.setdefault((known.node, known.island if together else ""), []).append(device)
    return list(groups.values())


def place(fleet: Fleet, wanted: Mapping[str, int], reserved: Mapping[str, int] | None = None) -> Slot | None:
    """Find a free slot on one of the devices asked for, and on no other.

    Args:
        wanted: device -> cells that it would take there (devices differ in size).
        reserved: device -> mask of cells that somebody else's plan needs; never used.

    Returns: the best fit, i.e. the slot whose free node is the smallest that fits (so large nodes stay whole), ties by
        device name and offset; None when there is none.
    """
    held = occupied(fleet)
    best: tuple[int, str, int] | None = None
    found: Slot | None = None
    for device, cells in wanted.items():
        taken = held[device] | (reserved or {}).get(device, 0)
        for slot in blocks(device, cells):
            if slot.mask & taken:
                continue
            key = (buddy(slot, taken), fleet.devices[device].name, slot.offset)
            if best is None or key < best:
                best, found = key, slot
    return found
