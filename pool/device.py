"""One device as the daemon keeps its books: which sets are on it, for how many, and whose memory another set may take."""

import asyncio
import secrets
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
    parts: list["Resident"] = field(default_factory=list)
    """Those whose `base` this is, each one of its holders."""
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    """No other copy, of whatever daemon, is called so."""

    @property
    def failed(self) -> bool:
        """Its copy came to nothing: none of its own memory is there."""
        return self.filled.done() and self.filled.exception() is not None

    @property
    def heir(self) -> "Resident | None":
        """The only one who has its memory, if that is a part that is had by somebody."""
        return self.parts[0] if self.holders == len(self.parts) == 1 and self.parts[0].holders else None

    @property
    def blocks(self) -> Groups:
        """All that an engine maps, those of `base` first."""
        lent = self.base.made if self.base is not None else ()
        return (*(lent[which] for which in self.shared), *self.made)

    @property
    def copies(self) -> dict[str, int]:
        """Those that an engine maps, with bytes of each; once they are `exported`."""
        lent = self.base.exported.result().blocks if self.base is not None else []
        theirs = {self.base.name: sum(lent[which].size for which in self.shared)} if self.base is not None else {}
        return {**theirs, self.name: self.size_bytes}


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
    """Copies, and bytes of them, of daemons before this one: how many engines map those."""
    users: Counter[int] = field(default_factory=Counter)
    """Process id -> how often it has something there; 0: of one in a namespace that this daemon does not see."""

    def holds_on_to(self, resident: Resident, newcomer: str) -> str | None:
        """Why the memory of one set can't become another's; None: it can."""
        if resident.holders != 1:
            return f"{resident.holders} have it"
        if newcomer in self.residents:
            return "the other is there already"
        if self.residents.get(resident.weight_set) is not resident:
            return "it has a part of another copy, or was found corrupt"
        if not resident.filled.done():
            return "it is on its way"
        return "its copy failed" if resident.failed else None

    def serves(self) -> bool:
        """Whether engines have weights there, whoever brought them."""
        there = any(one.holders and not one.failed for one in (*self.residents.values(), *self.former))
        return there or any(self.left.values())

    def state(self, free_bytes: int, registered_bytes: int) -> DeviceState:
        """free_bytes: by the driver's word. registered_bytes: of the host's memory, which all devices share."""
        return DeviceState(
            device=self.lane.gpu.uuid,
            total_bytes=self.total_bytes,
            free_bytes=free_bytes,
            sets={name: resident.holders for name, resident in self.residents.items()},
            resident_bytes=sum(one.size_bytes for one in (*self.residents.values(), *self.former)),
            registered_bytes=registered_bytes,
            left_bytes=self._left_bytes(),
        )

    def _left_bytes(self) -> int:
        """Each copy once, however many engines map it; of two that map different parts of one, the larger counts."""
        sizes = dict[str, int]()
        for (copy, size), engines in self.left.items():
            if engines:
                sizes[copy] = max(sizes.get(copy, 0), size)
        return sum(sizes.values())

    def leave(self, resident: Resident) -> bool:
        """It is not handed out any more. True: its memory is to be freed, by whoever asked."""
        known = resident in self.former or self.residents.get(resident.weight_set) is resident
        self.former.discard(resident)
        if self.residents.get(resident.weight_set) is resident:
            del self.residents[resident.weight_set]
        return known and not resident.failed

    def bequeath(self, base: Resident, heir: Resident) -> OnDevice:
        """What both have is the heir's from now on, which is whole by that. Return the rest of it, which is to be freed.

        Nobody else has it, and both copies are there.
        """
        its, own = base.exported.result(), heir.exported.result()
        rest = [which for which in range(len(its.blocks)) if which not in heir.shared]
        freed = OnDevice([its.blocks[which] for which in rest], [its.fds[which] for which in rest])
        heir.size_bytes += base.size_bytes - sum(block.size for block in freed.blocks)
        heir.made = own.groups = heir.blocks
        own.blocks[:0] = [its.blocks[which] for which in heir.shared]
        own.fds[:0] = [its.fds[which] for which in heir.shared]
        own.writers = tuple(device for device in own.writers if device in its.writers)
        heir.base, heir.shared = None, ()
        base.parts.remove(heir)
        base.holders -= 1
        self.former.discard(base)
        if self.residents.get(base.weight_set) is base:
            self.residents[base.weight_set] = heir
            self.former.discard(heir)
        return freed
