"""The audit: does the log agree with itself, with `holding`, with its copy on JetStream, and with the live state?

One pass over the whole history: positions without gaps, versions per stream, time, and who held which cell when. The same
pass folds the state, which is then compared with the table `holding` and with what the decider holds at that position.
"""

import asyncio
import contextlib
from typing import Final, Literal

import msgspec
import nats.errors
import nats.js.errors

from controlplane import subjects
from controlplane.bus import Bus
from controlplane.envelope import Recorded
from controlplane.events import GrantGiven, GrantReturned
from controlplane.fleet import Fleet, evolve
from controlplane.follower import Behind, follow
from controlplane.log import Log
from controlplane.refusal import Refused
from controlplane.upcast import UnknownEvent

FindingCode = Literal[
    "gap", "version", "time", "two_holders", "returned_unheld", "unreadable", "unfoldable", "holding_differs",
    "stream_missing", "stream_differs", "stream_behind", "state_differs", "state_unavailable",
]  # fmt: skip
PAGE: Final = 5_000
MOST: Final = 100
"""Findings of one kind; a log that is wrong everywhere needs no longer list."""
UNREADABLE: Final = (msgspec.DecodeError, UnknownEvent)
STREAM_S: Final = 10.0
"""Longest pause between two messages of the stream."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something is wrong. `position` names the event, where there is one; `message` has both sides."""

    code: FindingCode
    message: str
    position: int | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and what was found."""

    events: int
    """Events of the table, all of them checked."""
    in_stream: int
    """Messages of the stream compared with the table."""
    cells: int
    """Cells held, compared with the fold."""
    state_position: int | None
    """Where the live state was compared; None: it was not."""
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        return not self.findings


class Audit:
    """`Audit(log, bus).run()`. Without a bus, the stream and the live state are left out."""

    def __init__(self, log: Log, bus: Bus | None = None) -> None:
        self._log, self._bus = log, bus
        self._found: list[Finding] = []
        self._fleet: Fleet | None = Fleet()
        self._position = 0
        self._last_ms = 0
        self._versions: dict[str, int] = {}
        self._holders: dict[tuple[str, int], int] = {}
        self._grants: dict[int, GrantGiven] = {}

    async def run(self) -> Report:
        await self._history(await self._log.head())
        head, holding = await self._log.holding()
        await self._history(head)
        self._holding(holding)
        in_stream, state_position = 0, None
        if self._bus is not None:
            in_stream = await self._stream(self._bus)
            state_position = await self._state(self._bus)
        return Report(
            events=self._position, in_stream=in_stream, cells=len(holding), state_position=state_position,
            findings=tuple(self._found),
        )  # fmt: skip

    async def _history(self, target: int) -> None:
        """Check and fold up to position `target`."""
        while self._position < target:
            events = await self._page(target)
            if events is None:
                continue
            if not events:
                self._find("gap", f"the table ends at {self._position}, its head says {target}", self._position + 1)
                self._position = target
                return
            for recorded in events:
                self._check(recorded)
            await asyncio.sleep(0)

    async def _page(self, target: int) -> list[Recorded] | None:
        """The next events; None: the very next one can't be read, and was passed over."""
        limit = min(PAGE, target - self._position)
        while True:
            try:
                return await self._log.read(self._position, limit)
            except UNREADABLE as error:
                if limit > 1:
                    limit //= 2
                    continue
                self._position += 1
                self._find("unreadable", f"event {self._position} is none of this release's: {error}", self._position)
                self._fleet = None
                return None

    def _check(self, recorded: Recorded) -> None:
        at, stream = recorded.position, recorded.stream
        if at != self._position + 1:
            self._find("gap", f"event {at} follows {self._position}", at)
        version = self._versions.get(stream, 0) + 1
        if recorded.version != version:
            self._find("version", f"{stream} has version {recorded.version} where {version} comes next", at)
        if recorded.at_ms < self._last_ms:
            self._find("time", f"{recorded.at_ms} ms comes after {self._last_ms} ms", at)
        self._position, self._last_ms = at, max(recorded.at_ms, self._last_ms)
        self._versions[stream] = recorded.version
        if recorded.event.ENDS:
            del self._versions[stream]
        self._holder(recorded)
        if self._fleet is not None:
            try:
                self._fleet = evolve(self._fleet, recorded)
            except Exception as error:  # whatever it is: from here on there is no state to compare with
                self._find("unfoldable", f"{recorded.type} of {stream}: {error!r}", at)
                self._fleet = None

    def _holder(self, recorded: Recorded) -> None:
        match recorded.event:
            case GrantGiven() as given:
                self._grants[recorded.position] = given
                for cell in range(given.offset, given.offset + given.cells):
                    other = self._holders.setdefault((given.device, cell), recorded.position)
                    if other != recorded.position:
                        message = f"cell {cell} of {given.device} is held by grant {other}"
                        self._find("two_holders", message, recorded.position)
            case GrantReturned() as returned:
                grant = self._grants.pop(returned.grant, None)
                if grant is None:
                    self._find(
                        "returned_unheld", f"grant {returned.grant} of {returned.device} held nothing", recorded.position
                    )
                    return
                for cell in range(grant.offset, grant.offset + grant.cells):
                    if self._holders.get((grant.device, cell)) == returned.grant:
                        del self._holders[grant.device, cell]
            case _:
                pass

    def _holding(self, table: dict[tuple[str, int], int]) -> None:
        for key in sorted(table.keys() | self._holders.keys()):
            if table.get(key) != self._holders.get(key):
                device, cell = key
                message = f"cell {cell} of {device}: the table says grant {table.get(key)}, the events {self._holders.get(key)}"
                self._find("holding_differs", message)

    async def _stream(self, bus: Bus) -> int:
        """Compare every message of the stream with the table."""
        try:
            state = (await bus.js.stream_info(subjects.STREAM)).state
        except (nats.js.errors.Error, nats.errors.Error, TimeoutError) as error:
            self._find("stream_missing", f"the stream can't be read: {error!r}; the relay makes it anew at its next connection")
            return 0
        compared, page = 0, dict[int, Recorded]()
        async with contextlib.aclosing(follow(bus, after=max(0, state.first_seq - 1))) as following:
            while compared < state.messages:
                at = state.first_seq + compared
                try:
                    async with asyncio.timeout(STREAM_S):
                        sent = await anext(following)
                    if sent.position not in page:
                        page = {event.position: event for event in await self._log.read(sent.position - 1, PAGE)}
                except (TimeoutError, Behind, *UNREADABLE):
                    self._find("stream_differs", f"message {at} of {state.last_seq} can't be read or is another event", at)
                    break
                if page.get(sent.position) != sent:
                    self._find("stream_differs", f"event {sent.position} in the stream is not the table's", sent.position)
                compared += 1
        if state.last_seq < self._position and not await self._catches_up(bus):
            self._find("stream_behind", f"the stream ends at {state.last_seq}, the table at {self._position}", state.last_seq)
        return compared

    async def _catches_up(self, bus: Bus) -> bool:
        """Whether the stream comes to hold what the table held when we began."""
        try:
            async with asyncio.timeout(STREAM_S):
                while (await bus.js.stream_info(subjects.STREAM)).state.last_seq < self._position:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except (nats.js.errors.Error, nats.errors.Error, TimeoutError):
            return False
        return True

    async def _state(self, bus: Bus) -> int | None:
        """Compare the decider's state with a fold to its position."""
        try:
            live = await bus.state()
        except Refused as refused:
            self._find("state_unavailable", f"the decider's state can't be had: {refused.message}")
            return None
        if live.position < self._position or self._fleet is None:
            self._find("state_differs", f"the decider is at {live.position}, the log at {self._position}", live.position)
            return None
        await self._history(live.position)
        if self._fleet is None:
            return None
        for part in Fleet.__struct_fields__:
            if (mine := getattr(self._fleet, part)) != (theirs := getattr(live, part)):
                self._find("state_differs", f"{part}: the fold has {mine!r:.400}, the decider {theirs!r:.400}", live.position)
        return live.position

    def _find(self, code: FindingCode, message: str, position: int | None = None) -> None:
        if sum(found.code == code for found in self._found) < MOST:
            self._found.append(Finding(code=code, message=message, position=position))


async def audit(log: Log, bus: Bus | None = None) -> Report:
    """Audit a log; with `bus`, its stream and the live state too."""
    return await Audit(log, bus).run()
