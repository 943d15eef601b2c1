"""The desk: the one task that receives commands, decides, commits and replies.

    queue --> drain what waits --> decide each on the evolving state --> one append --> replies

Nobody hears an answer before its events are committed. A command that the log knows already gets its first answer:
if it was decided anew and the append says `Repeated`, the whole batch is decided again from the committed state
without it; if it was refused or changed nothing this time, the log is asked before the answer is given.
A command whose events the log can't keep is a fault of its own; those beside it are carried out. One whose events
contradict the log shows that our state is wrong: it is refused for good, and the process ends, to fold the log again.
A log whose disk is full refuses everybody and goes on: nothing was written, so nothing is uncertain. From then on whoever asks
whether all is well (ends of no request, as web does to know whether it is ready) hears so until there is room again.
A commit that fails for any other reason leaves nobody certain of what was written, so `run` raises and the process ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

import structlog

from controlplane.answer import Reply, answer
from controlplane.commands import EndRequests, Order
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet
from controlplane.log import Conflict, Full, HeadMoved, Log, Oversized, Repeated, StaleEpoch, Unstorable
from controlplane.refusal import DISK_FULL, Code, Refusal, Refused

MOST: Final = 256
"""Commands in one commit; more wait for the next, so that nobody waits long for strangers."""
DESK: Final = "desk"
FULL_RETRY_MS: Final = 5000
"""Disks are not emptied within a second."""
FULL_LOOK_S: Final = 0.5
"""Between two looks whether there is room again."""
log = structlog.get_logger("desk")


class Decision(Protocol):
    """What `decide` returns: the events, and the fleet after them."""

    @property
    def events(self) -> Sequence[Recorded]: ...
    @property
    def fleet(self) -> Fleet: ...


Decide = Callable[[Fleet, Order, int], Decision]
Respond = Callable[[Reply], Awaitable[None]]


class _Entry:
    """A command in the queue, and where its answer goes."""

    __slots__ = ("order", "reply", "respond", "silent")

    def __init__(self, order: Order, respond: Respond) -> None:
        self.order, self.respond = order, respond
        self.reply: Reply | None = None
        self.silent = False
        """It wrote no event this time: the log may know it all the same."""


class Desk:
    """Feed it with `submit` or `enqueue`; `run` does the work. `fleet` is the committed state."""

    def __init__(
        self, log_: Log, fleet: Fleet, epoch: int, decide: Decide, *, floor_ms: int = 0,
        on_commit: Callable[[Sequence[Recorded], Fleet], None] | None = None,
    ) -> None:  # fmt: skip
        """`floor_ms`: the last event's time (Unix milliseconds); the log's time never runs backwards."""
        self.fleet = fleet
        self._log, self._epoch, self._decide = log_, epoch, decide
        self._on_commit = on_commit or (lambda _events, _fleet: None)
        self._queue: asyncio.Queue[_Entry | None] = asyncio.Queue()
        self._now_ms = floor_ms
        self._closing = False
        self._full: Refusal | None = None
        """The last append found no room on the log's disk."""
        self._look_again_at = 0.0

    def enqueue(self, order: Order, respond: Respond) -> None:
        """Queue a command; `respond` is awaited with its answer, after the commit."""
        self._queue.put_nowait(_Entry(order, respond))

    async def submit(self, order: Order) -> Reply:
        """Queue a command and wait for its answer (a Refusal is returned, not raised)."""
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        async def respond(reply: Reply) -> None:
            if not answered.done():
                answered.set_result(reply)

        self.enqueue(order, respond)
        return await answered

    async def run(self) -> None:
        """Work until `close`. Raises what the log raised when a commit fails: the process must end."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < MOST and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            entries = [entry for entry in batch if entry is not None]
            if entries:
                await self._work(entries)
            if len(entries) < len(batch):
                return

    def close(self) -> None:
        """Have `run` return once it has worked off what waits now."""
        if not self._closing:
            self._closing = True
            self._queue.put_nowait(None)

    async def _work(self, entries: list[_Entry]) -> None:
        self._now_ms = max(self._now_ms, time.time_ns() // 1_000_000)
        known: dict[str, Reply] = {}
        while True:
            fleet, events = self._decided(entries, known)
            try:
                if events:
                    await self._log.append(self._epoch, events)
            except Repeated as repeated:
                found = await self._log.of_commands(sorted(repeated.commands))
                known |= {command: answer(first) for command, first in found.items()}
                continue
            except (StaleEpoch, HeadMoved):
                raise
            except Full as error:
                await self._refuse_for_lack_of_room(entries, error)
                return
            except Conflict as error:  # one of them is at fault, and nothing was written: each by itself, then
                if len(entries) > 1:
                    for entry in entries:
                        await self._work([entry])
                    return
                known[entries[0].order.id] = refusal = _fault(entries[0].order, error)
                if isinstance(error, Unstorable):
                    continue
                await entries[0].respond(refusal)  # its sender must not bring it to the next decider, and to the one after
                raise
            break
        if events:
            self._full = None
            self.fleet = fleet
            self._on_commit(events, fleet)
        await self._answer([entry for entry in entries if not entry.silent])
        await self._answer_silent([entry for entry in entries if entry.silent])

    async def _still_full(self) -> Refusal | None:
        """After an append that found no room: whether there is some by now, looked at once in a while at most."""
        if self._full is not None and time.monotonic() >= self._look_again_at:
            try:
                await self._log.room()
            except Full as error:
                self._full = _no_room(error)
            else:
                self._full = None
            self._look_again_at = time.monotonic() + FULL_LOOK_S
        return self._full

    async def _refuse_for_lack_of_room(self, entries: Sequence[_Entry], error: Full) -> None:
        """Nothing was written, and the state is as it was: whoever asks again is answered once there is room."""
        if self._full is None:
            log.error("log_full", reason=str(error))
        self._full = _no_room(error)
        for entry in entries:
            await entry.respond(self._full)

    def _decided(self, entries: list[_Entry], known: dict[str, Reply]) -> tuple[Fleet, list[Recorded]]:
        """Decide each entry in order, from the committed state on; set its reply."""
        fleet, events, seen = self.fleet, list[Recorded](), dict[str, _Entry]()
        for entry in entries:
            order = entry.order
            entry.silent = False
            if (reply := known.get(order.id)) is not None:
                entry.reply = reply
                continue
            if (twin := seen.get(order.id)) is not None:  # sent twice, and both are here
                entry.reply, entry.silent = twin.reply, twin.silent
                continue
            seen[order.id] = entry
            try:
                decision = self._decide(fleet, order, self._now_ms)
            except Refused as refused:
                entry.reply, entry.silent = Refusal.of(refused), True
            except Exception as error:
                log.exception("decision_failed", command=order.id, body=type(order.body).__name__, actor=order.actor)
                entry.reply = Refusal(Code.FAULT, f"the plane could not decide {order.id}: {error!r}; its log says where")
            else:
                fleet = decision.fleet
                events.extend(decision.events)
                entry.reply, entry.silent = answer(decision.events), not decision.events
        return fleet, events

    async def _answer(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            assert entry.reply is not None
            await entry.respond(entry.reply)

    async def _answer_silent(self, entries: Sequence[_Entry]) -> None:
        """Answer what wrote nothing, from the log where it was carried out before. The desk's own commands are always new."""
        doubtful = sorted({entry.order.id for entry in entries if entry.order.actor != DESK})
        if doubtful:
            found = await self._log.of_commands(doubtful)
            for entry in entries:
                if entry.order.id in found:
                    entry.reply = answer(found[entry.order.id])
        for entry in entries:
            if isinstance(entry.order.body, EndRequests) and not entry.order.body.ends:
                entry.reply = await self._still_full() or entry.reply
        await self._answer(entries)


def _no_room(error: Full) -> Refusal:
    message = f"the log's disk is full, and nothing was carried out: make room for Postgres ({error})"
    return Refusal(Code.UNAVAILABLE, message, FULL_RETRY_MS, {"reason": DISK_FULL})


def _fault(order: Order, error: Conflict) -> Refusal:
    if isinstance(error, Oversized):
        return Refusal(Code.TOO_LARGE, f"{error}; nothing of it was carried out")
    log.error("events_refused", command=order.id, body=type(order.body).__name__, actor=order.actor, error=repr(error))
    return Refusal(Code.FAULT, f"the log does not take what {order.id} leads to: {error}")
