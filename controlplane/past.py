"""The past: the fleet as it was after any event of the log, folded anew, since nobody keeps it.

A look folds from the nearest state below: one that an earlier look left here, or a snapshot, or the empty fleet. It takes a
page of events at a time and lets whatever else this process does have its turn in between: streams run through it.
"""

import asyncio
from typing import Final, Protocol

import msgspec

from controlplane.envelope import Recorded
from controlplane.fleet import Fleet, fold
from controlplane.log.snapshots import Kept, nearest
from controlplane.moments import Position, Time, When, utc
from controlplane.refusal import Code, Refused

PAGE: Final = 200
"""Events decoded and folded in one go: a millisecond."""
NEAR: Final = 4_000
"""So far below a look a state is kept every PAGE events: whoever goes back and forth folds one page. From a state so near no
snapshot is looked for: folding is as quick."""
FAR: Final = 20_000
"""Farther below, a state is kept as often as snapshots are taken."""
KEPT: Final = 64
"""States; they share all that has not changed between them."""
LOOKS: Final = 2
"""At once. Others wait: together they would only take the longer, and more of this process."""
DEADLINE_S: Final = 10.0


class Readable(Kept, Protocol):
    """What looking back needs of a log: see `contract.Log`."""

    async def head(self) -> int: ...

    async def read(self, after: int, limit: int = 5000) -> list[Recorded]: ...

    async def first_since(self, at_ms: int) -> int: ...


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the past: after event `position`, which was at `at_ms`. Positions from `first` to `newest` can be seen."""

    position: int
    at_ms: int
    first: int
    newest: int


class States:
    """Folded states by position; those that nothing was folded from for longest leave."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._kept: dict[int, Fleet] = {}

    def below(self, position: int) -> Fleet:
        """The nearest at or below `position`; the empty fleet when there is none."""
        nearest = max((kept for kept in self._kept if kept <= position), default=0)
        if (found := self._kept.pop(nearest, None)) is None:
            return Fleet()
        self._kept[nearest] = found
        return found

    def keep(self, fleet: Fleet) -> None:
        self._kept.pop(fleet.position, None)
        self._kept[fleet.position] = fleet
        while len(self._kept) > self._most:
            del self._kept[next(iter(self._kept))]


class Past:
    """Looks back into a log. `moment` says which place is meant, `fleet` what was there."""

    def __init__(self, log_: Readable, *, deadline_s: float = DEADLINE_S) -> None:
        self._log, self._deadline_s = log_, deadline_s
        self._states = States()
        self._turns = asyncio.Semaphore(LOOKS)

    async def moment(self, when: When | None) -> Moment:
        """The place that is meant; None: the newest. Raises Refused: EVENT_UNKNOWN (no event there), UNAVAILABLE.

        A time is found by halves: it is the deciders' clock's, which never runs backwards in the log (`Log.first_since`).
        """
        newest = await self._log.head()
        oldest = await self._log.read(0, 1)
        if not newest or not oldest:
            raise Refused(Code.EVENT_UNKNOWN, "nothing has happened yet: the log has no event", first=0, newest=0)
        first = oldest[0]
        match when:
            case None:
                position, none = newest, ""
            case Position():
                position, none = when.position, f"there is no event {when.position}"
            case Time():
                position = min(await self._log.first_since(when.at_ms + 1) - 1, newest)  # more may have happened meanwhile
                none = f"no event is as old as {utc(when.at_ms)}"
        if not first.position <= position <= newest:
            message = f"{none}: the log begins with event {first.position}, {utc(first.at_ms)}, and its newest is {newest}"
            raise Refused(Code.EVENT_UNKNOWN, message, first=first.position, newest=newest)
        event = (await self._log.read(position - 1, 1))[0]
        return Moment(position=position, at_ms=event.at_ms, first=first.position, newest=newest)

    async def fleet(self, moment: Moment) -> Fleet:
        """The state there. Raises Refused: UNAVAILABLE (or it takes too long), EVENT_UNKNOWN (it can't be had any more)."""
        try:
            async with asyncio.timeout(self._deadline_s), self._turns:
                return await self._folded(moment)
        except TimeoutError as error:
            left = moment.position - self._states.below(moment.position).position
            message = (
                f"the state after event {moment.position} was not there within {self._deadline_s:g} s: {left} events are still "
                "to be folded; what was folded is kept, so ask again"
            )
            raise Refused(Code.UNAVAILABLE, message, retry_after_ms=1000, left=left) from error

    async def _folded(self, moment: Moment) -> Fleet:
        fleet, target = await self._below(moment), moment.position
        try:
            while fleet.position < target:
                page = await self._log.read(fleet.position, min(PAGE - fleet.position % PAGE, target - fleet.position))
                if not page:
                    message = f"the log ends at {fleet.position}, and event {target} was seen in it: run `enginehouse audit`"
                    raise Refused(Code.FAULT, message)
                fleet = fold(page, fleet)
                if fleet.position % (PAGE if target - fleet.position <= NEAR else FAR) == 0:
                    self._states.keep(fleet)
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._states.keep(fleet)  # the next look goes on from here
            raise
        return fleet

    async def _below(self, moment: Moment) -> Fleet:
        """The nearest state to fold from."""
        found, stored = self._states.below(moment.position), None
        if moment.position - found.position > NEAR:
            stored = await nearest(self._log, after=found.position, up_to=moment.position)
        if stored is not None:
            self._states.keep(stored)
            found = stored
        if found.position + 1 < moment.first:
            message = (
                f"the state after event {moment.position} can't be had any more: the log begins with event {moment.first}, "
                "and no snapshot that is kept lies between the two"
            )
            raise Refused(Code.EVENT_UNKNOWN, message, first=moment.first, newest=moment.newest)
        return found
