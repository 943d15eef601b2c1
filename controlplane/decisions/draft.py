"""A decision in the making: the events so far, and the fleet as they leave it."""

import msgspec

from controlplane import ids
from controlplane.commands import Order
from controlplane.envelope import Recorded
from controlplane.events import AnyEvent
from controlplane.fleet.evolve import evolve
from controlplane.fleet.state import Fleet


class Decision(msgspec.Struct, frozen=True):
    """What a command leads to. No events: it was a no-op."""

    events: tuple[Recorded, ...]
    fleet: Fleet
    """The fleet after the events."""


class Draft:
    """Collects the events of one command. Each one is evolved at once, so the next question sees its effect.

    Attributes:
        fleet: the state after the events so far. now: Unix milliseconds, the command's only clock.
    """

    __slots__ = ("_made", "events", "fleet", "now", "order")

    def __init__(self, fleet: Fleet, order: Order, now: int) -> None:
        self.fleet, self.order, self.now = fleet, order, now
        self.events: list[Recorded] = []
        self._made = 0

    def emit(self, event: AnyEvent, *, operation: str | None = None, because: int | None = None) -> Recorded:
        """Append `event`. Its position and version are predictions that the log, which has one writer, confirms."""
        stream = event.stream
        recorded = Recorded(
            position=self.fleet.position + 1, stream=stream, version=self.fleet.versions.get(stream, 0) + 1, at_ms=self.now,
            command=self.order.id, ordinal=len(self.events), event=event, operation=operation, because=because,
            actor=self.order.actor, trace=self.order.trace,
        )  # fmt: skip
        self.fleet = evolve(self.fleet, recorded)
        self.events.append(recorded)
        return recorded

    def new_id(self, prefix: str) -> str:
        """An id that this command, decided again on the same state, would give again."""
        made = ids.derived(prefix, self.order.id, self._made)
        self._made += 1
        return made

    def decision(self) -> Decision:
        return Decision(tuple(self.events), self.fleet)
