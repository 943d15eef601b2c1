"""What the live page needs to see of the plane. The web process's follower offers it; tests have one of their own."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

from controlplane.envelope import Recorded
from controlplane.fleet import Fleet
from controlplane.subjects import NodeBeat


class Link(StrEnum):
    """How this web process stands to the log."""

    LIVE = "live"
    LAGGING = "lagging"
    """Events arrive, but the newest known ones have not been folded yet."""
    DISCONNECTED = "disconnected"
    """The bus is away: what is shown is the last that was known."""


Listener = Callable[[Recorded | None], None]
"""Called in the event loop after each folded event (with it), and after a new beat or a change of the link (None)."""


class Sight(Protocol):
    """The newest known state; reading it is free (the fleet is a persistent value)."""

    @property
    def fleet(self) -> Fleet: ...

    @property
    def beats(self) -> Mapping[str, NodeBeat]:
        """The last beat of each node, by node."""
        ...

    @property
    def link(self) -> Link: ...

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Register `listener`; the returned function takes it away again."""
        ...
