"""What a plan is, and the board on which the waiters of one round claim theirs."""

import msgspec

from controlplane.decisions.placement import Slot


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    slot: Slot
    """Of a gang: of its first rank."""
    others: tuple[Slot, ...] = ()
    """Of the gang's further ranks, in their order."""
    instance: str | None = None
    """The skeleton to wake or to switch; None: a new one."""
    fetched: str | None = None
    """The skeleton to take off another GPU first; it is woken here once that is done."""
    grant: int | None = None
    """The grant that a switch keeps."""
    victims: tuple[str, ...] = ()
    """To be sent to sleep, now."""
    occupants: tuple[str, ...] = ()
    """Whom it waits for: leaving, busy or still loading. Empty, and no victims: the slot is free."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.slot, *self.others)

    @property
    def ready(self) -> bool:
        return not self.victims and not self.occupants and self.fetched is None


class Board:
    """What the waiters served so far in this round have claimed; those who come later work round it.

    Attributes:
        reserved: device -> mask of cells. kept: skeletons that a plan counts on. barred: instances in the slot of one
        who is past the bound: they get no new requests. device_claims, pool_claims: bytes promised, by device and by node.
    """

    def __init__(self) -> None:
        self.reserved: dict[str, int] = {}
        self.kept: set[str] = set()
        self.barred: dict[str, str] = {}
        self.device_claims: dict[str, int] = {}
        self.pool_claims: dict[str, int] = {}

    def claim(self, plan: Plan) -> None:
        for slot in plan.slots:
            self.reserved[slot.device] = self.reserved.get(slot.device, 0) | slot.mask
        self.kept.update(instance for instance in (plan.instance, plan.fetched) if instance is not None)
