"""What the live page needs to see of the plane. The web process's `PlaneView` offers it; tests have one of their own."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from controlplane.fleet import Fleet
from controlplane.subjects import NodeBeat


class Sight(Protocol):
    """The newest known state; reading it is free (the fleet is a persistent value)."""

    @property
    def fleet(self) -> Fleet: ...

    @property
    def beats(self) -> Mapping[str, NodeBeat]:
        """The last beat of each node, by node."""
        ...

    @property
    def synced(self) -> bool:
        """Whether events are being followed; False: what is shown is the last that was known."""
        ...

    @property
    def behind_s(self) -> float:
        """For how many seconds an event has been known to be written that has not come here; 0: all known ones have."""
        ...

    def listening(self, listener: Callable[[Any], None], /) -> AbstractContextManager[None]:
        """Call `listener` in the event loop with every change: a `Recorded` once folded, a `NodeBeat`, a resync."""
        ...
