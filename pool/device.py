"""One device as the daemon keeps its books: which sets are on it, for how many, and whose memory another set may take."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from pool.blocks import Groups
from pool.described import DeviceState
from pool.fill import OnDevice
from pool.lane import Lane
from pool.making import Making
from pool.messages import Filled


@dataclass(eq=False)
class Resident:
    """A set on a device, or on its way there."""

    weight_set: str
    exported: asyncio.Future[OnDevice]
    filled: asyncio.Future[Filled]
    made: Groups
    """The segments in each block of its own memory there."""
    holders: int = 0
    size_bytes: int = 0
    """Of its own memory."""
    base: "Resident | None" = None
    """The other one, of the same set, whose memory it shares: this one has what an engine can't map of that."""
    shared: tuple[int, ...] = ()
    """Which of that one's blocks."""

    @property
    def blocks(self) -> Groups:
        """All that an engine maps, those of `base` first."""
        lent = self.base.made if self.base is not None else ()
        return (*(lent[which] for which in self.shared), *self.made)


@dataclass
class Device:
    lane: Lane
    total_bytes: int
    making: Making = field(default_factory=Making)
    residents: dict[str, Resident] = field(default_factory=dict)
    former: set[Resident] = field(default_factory=set)
    """For those who have them, and for nobody else: copies of a set that was found corrupt and has been brought anew, and what
    an engine whose segments lie otherwise has beside `Resident.base`."""
    left: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Sets, and their bytes, of a daemon before this one: how many engines map them."""

    def holds_on_to(self, resident: Resident, newcomer: str) -> str | None:
        """Why the memory of one set can't become another's; None: it can."""
        if resident.holders != 1:
            return f"{resident.holders} have it"
        if newcomer in self.residents:
            return "the other is there already"
        if self.residents.get(resident.weight_set) is not resident or not resident.filled.done():
            return "it is on its way"
        return "its copy failed" if resident.filled.exception() is not None else None

    def serves_others(self, newcomer: str) -> bool:
        """Whether engines have weights there, whoever brought them, that are not the newcomer's."""
        there = any(one.holders for name, one in self.residents.items() if name != newcomer)
        return there or any(one.holders for one in self.former) or any(self.left.values())

    def state(self, free_bytes: int, registered_bytes: int) -> DeviceState:
        """free_bytes: by the driver's word. registered_bytes: of the host's memory, which all devices share."""
        return DeviceState(
            device=self.lane.gpu.uuid,
            total_bytes=self.total_bytes,
            free_bytes=free_bytes,
            sets={name: resident.holders for name, resident in self.residents.items()},
            resident_bytes=sum(one.size_bytes for one in (*self.residents.values(), *self.former)),
            registered_bytes=registered_bytes,
            left_bytes=sum(size for (_, size), engines in self.left.items() if engines),
        )

    def leave(self, resident: Resident) -> bool:
        """It is not handed out any more. True: its memory is to be freed, by whoever asked."""
        known = resident in self.former or self.residents.get(resident.weight_set) is resident
        self.former.discard(resident)
        if self.residents.get(resident.weight_set) is resident:
            del self.residents[resident.weight_set]
        return known and resident.filled.exception() is None
