"""What is in the pool, who holds it, what the budget allows. Only bookkeeping: no file is touched here."""

from dataclasses import dataclass, field

import msgspec

from pool.described import Described, Dropped, SetState
from pool.manifest import Manifest, Origin
from pool.messages import Refusal
from pool.sizes import both, written

_REMEMBERED = 100
"""Corrupt sets that are reported; a disk that eats more than that is no secret any more."""


class Refused(Exception):
    def __init__(self, code: str, message: str, *, need_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.refusal = Refusal(code=code, message=message, need_bytes=need_bytes, free_bytes=free_bytes)


@dataclass
class Resident:
    manifest: Manifest
    holders: int = 0
    bad: tuple[str, ...] = ()
    leaving: bool = False
    """A drop is looking for processes that map it; attaching is refused meanwhile, staging its source again keeps it."""
    edition: object = field(default_factory=object)
    """Stands for its files as they are; another one once they were brought anew."""


@dataclass
class Residency:
    budget_bytes: int
    sets: dict[str, Resident] = field(default_factory=dict)
    dropped: dict[str, Dropped] = field(default_factory=dict)
    _reserved: dict[int, int] = field(default_factory=dict)
    _tickets: int = 0

    @property
    def used_bytes(self) -> int:
        """Sets and stagings under way."""
        return sum(resident.manifest.size_bytes for resident in self.sets.values()) + sum(self._reserved.values())

    # ---- stagings -------------------------------------------------------------------------------------------

    def admit(self, need_bytes: int, room_bytes: int) -> int:
        """A ticket for so many bytes, to be settled. Raises Refused: `over_budget`, `no_room` (room: what the host has)."""
        free = self.budget_bytes - self.used_bytes
        if need_bytes > free:
            need, left = both(need_bytes, max(free, 0))
            raise Refused(
                "over_budget",
                f"the set needs {need}, {left} of the pool's budget of {written(self.budget_bytes)} are free: "
                "drop a set or raise node.pool_bytes",
                need_bytes=need_bytes,
                free_bytes=max(free, 0),
            )
        if need_bytes > room_bytes:
            need, left = both(need_bytes, room_bytes)
            raise Refused(
                "no_room",
                f"the set needs {need}, the host has {left} left: free memory there or drop a set",
                need_bytes=need_bytes,
                free_bytes=room_bytes,
            )
        self._tickets += 1
        self._reserved[self._tickets] = need_bytes
        return self._tickets

    def settle(self, ticket: int) -> None:
        """The staging is over, however it ended. Twice is fine."""
        self._reserved.pop(ticket, None)

    def by_origin(self, origin: Origin) -> Resident | None:
        """A sound set with the bytes of exactly these files."""
        for resident in self.sets.values():
            if not resident.bad and origin in resident.manifest.origins:
                resident.leaving = False
                return resident
        return None

    def add(self, manifest: Manifest) -> None:
        """A new set, or a sound copy in the place of a corrupt one."""
        if (known := self.sets.get(manifest.weight_set)) is not None:
            known.manifest, known.bad, known.edition = manifest, (), object()
        else:
            self.sets[manifest.weight_set] = Resident(manifest)
        self.dropped.pop(manifest.weight_set, None)

    def add_origin(self, weight_set: str, origin: Origin) -> Manifest:
        """The same bytes from another place (or from files written anew); the manifest to be kept."""
        resident = self.sets[weight_set]
        others = tuple(known for known in resident.manifest.origins if (known.path, known.form) != (origin.path, origin.form))
        resident.manifest = msgspec.structs.replace(resident.manifest, origins=(*others, origin))
        resident.leaving = False
        return resident.manifest

    # ---- holders --------------------------------------------------------------------------------------------

    def find(self, weight_set: str) -> Resident:
        """Raises Refused: `unknown_set`, `corrupt`."""
        resident = self.sets.get(weight_set)
        if resident is not None:
            if resident.bad:
                raise self._corrupt(weight_set, resident.bad)
            if not resident.leaving:
                return resident
        if (gone := self.dropped.get(weight_set)) is not None:
            raise self._corrupt(weight_set, gone.bad)
        raise Refused("unknown_set", f"the pool does not hold {weight_set[:64]}: stage its source")

    def _corrupt(self, weight_set: str, bad: tuple[str, ...]) -> Refused:
        return Refused(
            "corrupt", f"{weight_set} was found corrupt ({len(bad)} tensors, such as {bad[0]}): stage its source again"
        )

    def hold(self, weight_set: str) -> Manifest:
        resident = self.find(weight_set)
        resident.holders += 1
        return resident.manifest

    def release(self, weight_set: str) -> bool:
        """True if the set is corrupt and nobody is left who holds it: it is to be removed."""
        resident = self.sets[weight_set]
        resident.holders -= 1
        return bool(resident.bad) and not resident.holders

    # ---- leaving --------------------------------------------------------------------------------------------

    def leave(self, weight_set: str) -> Resident:
        """First half of a drop. Raises Refused: `unknown_set`, `in_use`."""
        resident = self.sets.get(weight_set)
        if resident is None:
            raise Refused("unknown_set", f"the pool does not hold {weight_set[:64]}")
        if resident.leaving:  # and may stay yet
            raise Refused("in_use", f"{weight_set} is being dropped already: ask again in a moment")
        if resident.holders:
            raise Refused(
                "in_use", f"{weight_set} is mapped by {resident.holders} connections: put their engines to sleep first"
            )
        resident.leaving = True
        return resident

    def stay(self, weight_set: str, why: str) -> Refused:
        """The drop ends here: somebody needs the set."""
        if (resident := self.sets.get(weight_set)) is not None:
            resident.leaving = False
        return Refused("in_use", f"{weight_set} {why}")

    def remove(self, weight_set: str) -> None:
        """Its files are gone."""
        resident = self.sets.pop(weight_set)
        if resident.bad:
            self.dropped[weight_set] = Dropped(weight_set=weight_set, bad=resident.bad)
            while len(self.dropped) > _REMEMBERED:
                del self.dropped[next(iter(self.dropped))]

    def edition(self, weight_set: str) -> object:
        """See `Resident.edition`; None: it is not there."""
        resident = self.sets.get(weight_set)
        return resident.edition if resident is not None else None

    def condemn(self, weight_set: str, bad: tuple[str, ...], edition: object) -> bool:
        """Nobody gets this set any more, unless it was brought anew since somebody began to look at that edition. True if
        nobody holds it: it is to be removed."""
        if (resident := self.sets.get(weight_set)) is None or resident.edition is not edition:
            return False
        resident.bad = bad
        return not resident.holders

    def describe(self, pid: int) -> Described:
        sets = tuple(
            SetState(
                weight_set=name,
                size_bytes=resident.manifest.size_bytes,
                mapped_by=resident.holders,
                source=resident.manifest.origins[0].path,
                bad=resident.bad,
                node_bytes=resident.manifest.node_bytes,
            )
            for name, resident in self.sets.items()
        )
        dropped = tuple(self.dropped.values())
        return Described(budget_bytes=self.budget_bytes, used_bytes=self.used_bytes, pid=pid, sets=sets, dropped=dropped)
