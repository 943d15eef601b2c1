"""The log's twin in memory: for pure tests, the simulation and property tests. Keeps every promise but durability."""

import bisect
from collections import defaultdict
from collections.abc import Sequence

from controlplane.envelope import Recorded, encode_event, without_nul
from controlplane.log.contract import CellHeld, Conflict, HeadMoved, Repeated, Snapshot, StaleEpoch, Unstorable, weigh
from controlplane.log.holding import Change, change
from controlplane.log.thinning import Place, leaving


class MemoryLog:
    """See `contract.Log`."""

    def __init__(self) -> None:
        self._events: list[Recorded] = []
        self._commands: dict[str, list[Recorded]] = defaultdict(list)
        self._streams: dict[str, list[Recorded]] = defaultdict(list)
        self._versions: set[tuple[str, int]] = set()
        self._holding: dict[tuple[str, int], int] = {}
        self._snapshots: dict[Place, Snapshot] = {}
        self._epoch = 0

    async def append(self, epoch: int, events: Sequence[Recorded]) -> None:
        if epoch != self._epoch:
            raise StaleEpoch(f"epoch {epoch} is over, {self._epoch} reigns")
        after = events[0].position - 1
        if after != len(self._events):
            raise HeadMoved(f"head is at {len(self._events)}, not at {after}")
        if repeated := {event.command for event in events if event.command in self._commands}:
            raise Repeated(repeated)
        self._check(events, after)
        holding = self._held(change(events))
        for event in events:
            self._events.append(event)
            self._commands[event.command].append(event)
            self._streams[event.stream].append(event)
            self._versions.add((event.stream, event.version))
        self._holding = holding

    def _check(self, events: Sequence[Recorded], after: int) -> None:
        places: set[tuple[str, int]] = set()
        versions = {(event.stream, event.version) for event in events}
        if len(versions) < len(events) or versions & self._versions:
            raise Conflict("a version of a stream is taken, or twice in the batch")
        for position, event in enumerate(events, after + 1):
            if event.position != position:
                raise Conflict(f"event {event.position} stands at position {position}")
            if (event.command, event.ordinal) in places:
                raise Conflict(f"ordinal {event.ordinal} of {event.command} is taken")
            places.add((event.command, event.ordinal))
            _keepable(event)

    def _held(self, net: Change) -> dict[tuple[str, int], int]:
        holding = dict(self._holding)
        for device, number in net.freed:
            cells = [key for key, held in holding.items() if key[0] == device and held == number]
            if not cells:
                raise Conflict(f"grant {number} ends but held nothing of {device}")
            for key in cells:
                del holding[key]
        for device, cell, number in net.held:
            if (held := holding.setdefault((device, cell), number)) != number:
                raise CellHeld(f"cell {cell} of {device} is held by grant {held}")
        return holding

    async def room(self) -> None:
        """There always is."""

    async def begin_reign(self, host: str, pid: int) -> int:
        self._epoch += 1
        return self._epoch

    async def head(self) -> int:
        return len(self._events)

    async def read(self, after: int, limit: int = 5000) -> list[Recorded]:
        return self._events[after : after + limit]

    async def of_commands(self, commands: Sequence[str]) -> dict[str, list[Recorded]]:
        return {command: list(self._commands[command]) for command in commands if command in self._commands}

    async def of_command(self, command: str) -> list[Recorded]:
        return list(self._commands.get(command, ()))

    async def of_stream(self, stream: str, after_version: int = 0, limit: int = 1000) -> list[Recorded]:
        return [event for event in self._streams.get(stream, ()) if event.version > after_version][:limit]

    async def first_since(self, at_ms: int) -> int:
        return bisect.bisect_left(self._events, at_ms, key=lambda event: event.at_ms) + 1

    async def holding(self) -> tuple[int, dict[tuple[str, int], int]]:
        return len(self._events), dict(self._holding)

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        self._snapshots.setdefault(Place(snapshot.position, snapshot.evolve_version), snapshot)
        for place in leaving(self._snapshots, snapshot.evolve_version):
            del self._snapshots[place]

    async def snapshot(self, evolve_version: int, *, after: int = 0, up_to: int | None = None) -> Snapshot | None:
        ours = [place for place in self._snapshots if place.evolve_version == evolve_version and place.position > after]
        newest = max((place for place in ours if up_to is None or place.position <= up_to), default=None)
        return None if newest is None else self._snapshots[newest]


def _keepable(event: Recorded) -> None:
    try:
        encoded = encode_event(event.event)
    except UnicodeEncodeError as error:
        raise Unstorable(f"{event.type}: {error}") from error
    weigh(event, encoded)
    if without_nul(encoded) != encoded:
        raise Unstorable(f"{event.type} holds a NUL")
