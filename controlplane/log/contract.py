"""What every log does, and how it says no."""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec

from controlplane.envelope import Recorded

MOST_BYTES: Final = 768 * 1024
"""Of one event's data. With its envelope it must pass the bus, where followers read it, and a NATS server that nobody has told
otherwise takes 1 MiB in a message."""


class Conflict(Exception):
    """It contradicts the log (a version taken, a grant returned that held nothing): the writer errs. Nothing was written."""


class StaleEpoch(Conflict):
    """Another decider reigns. Nothing was written; this one must stop."""


class HeadMoved(Conflict):
    """The log has events that the writer did not see. Nothing was written; it must fold them first."""


class CellHeld(Conflict):
    """A grant would take a cell that another one holds. Nothing was written."""


class Unstorable(Conflict):
    """An event holds what the log can't keep (a NUL, half a surrogate, a number that is too large). Nothing was written."""


class Oversized(Unstorable):
    """An event is larger than MOST_BYTES: the relay could never send it. Nothing was written."""


class Full(Exception):
    """The log's disk has no room. Nothing was written; the same events may be written when there is room again."""


class Repeated(Exception):
    """Some of the commands have written their events before. Nothing was written; their first answers are in the log."""

    def __init__(self, commands: Iterable[str]) -> None:
        self.commands = frozenset(commands)
        super().__init__(f"already in the log: {', '.join(sorted(self.commands))}")


class Snapshot(msgspec.Struct, frozen=True):
    """A folded state as it is stored: `state` is opaque here (see `snapshots`), `digest` its BLAKE2b-256."""

    position: int
    evolve_version: int
    state: bytes
    digest: bytes


def weigh(event: Recorded, encoded: bytes) -> None:
    """Raises Oversized with both numbers."""
    if len(encoded) > MOST_BYTES:
        raise Oversized(f"{event.type} of {event.stream} has {len(encoded)} bytes; an event has at most {MOST_BYTES}")


class Log(Protocol):
    """The log as the desk, the relay and the audit see it. Positions count from 1 without gaps, in commit order."""

    async def append(self, epoch: int, events: Sequence[Recorded]) -> None:
        """Write `events` (at least one, with the positions after the head) in one commit, or nothing.

        Raises StaleEpoch, HeadMoved, Repeated, CellHeld, Oversized, Unstorable, Conflict or Full. Anything else means that
        nobody knows whether it was written: the writer must stop and fold the log again.
        """
        ...

    async def room(self) -> None:
        """Try to write as much as a large batch of events takes, and undo it. Raises Full."""
        ...

    async def begin_reign(self, host: str, pid: int) -> int:
        """Raise the epoch and return it: from now on every append with an older one is refused."""
        ...

    async def head(self) -> int:
        """The last position; 0: empty."""
        ...

    async def read(self, after: int, limit: int = 5000) -> list[Recorded]:
        """Up to `limit` events with positions above `after`, in order."""
        ...

    async def of_commands(self, commands: Sequence[str]) -> dict[str, list[Recorded]]:
        """The events that each of these commands wrote, in order; commands that wrote none are left out."""
        ...

    async def of_command(self, command: str) -> list[Recorded]: ...

    async def of_stream(self, stream: str, after_version: int = 0, limit: int = 1000) -> list[Recorded]:
        """Events of one stream with versions above `after_version`, in order."""
        ...

    async def first_since(self, at_ms: int) -> int:
        """Position of the first event at or after `at_ms` (Unix milliseconds); the head + 1 when there is none.

        The log's time never runs backwards, so this is a search by halves.
        """
        ...

    async def holding(self) -> tuple[int, dict[tuple[str, int], int]]:
        """The head, and as of it (device, cell) -> number of the grant that holds it."""
        ...

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        """Keep it, and drop those that have become superfluous (`thinning`)."""
        ...

    async def snapshot(self, evolve_version: int, *, after: int = 0, up_to: int | None = None) -> Snapshot | None:
        """The newest of that version above position `after`, and at or before `up_to` unless that is None."""
        ...
