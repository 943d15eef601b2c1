"""Snapshots: a folded state beside the log, so that a start needs only the tail. Always rebuildable, never trusted blindly."""

import asyncio
import contextlib
import gc
import hashlib
import time
import zlib
from typing import Final, Protocol

import msgspec
import structlog

from controlplane.fleet import EVOLVE_VERSION, Fleet, dump, evolve, load
from controlplane.log.contract import Log, Snapshot
from controlplane.log.thinning import APART

EVERY_EVENTS: Final = 20_000
"""Folded in a fraction of a second."""
EVERY_S: Final = 300.0
PAGE: Final = 5_000
log = structlog.get_logger("snapshots")


class Kept(Protocol):
    """What finding a snapshot needs of a log: see `contract.Log`."""

    async def snapshot(self, evolve_version: int, *, after: int = 0, up_to: int | None = None) -> Snapshot | None: ...


def take(fleet: Fleet) -> Snapshot:
    """Pack a state. Safe in another thread: the state never changes."""
    state = zlib.compress(dump(fleet), 1)
    return Snapshot(fleet.position, EVOLVE_VERSION, state, _digest(state))


def usable(snapshot: Snapshot) -> Fleet | None:
    """Unpack a state; None when it is damaged or of another meaning (the caller then looks further back)."""
    if snapshot.evolve_version != EVOLVE_VERSION or snapshot.digest != _digest(snapshot.state):
        return None
    try:
        fleet = load(zlib.decompress(snapshot.state))
    except (zlib.error, msgspec.DecodeError, TypeError):
        return None
    return fleet if fleet.position == snapshot.position else None


async def nearest(log_: Kept, *, after: int = 0, up_to: int) -> Fleet | None:
    """The newest state that is stored above position `after`, and at or before `up_to`. Damaged ones are passed over."""
    while (snapshot := await log_.snapshot(EVOLVE_VERSION, after=after, up_to=up_to)) is not None:
        if (fleet := await asyncio.to_thread(usable, snapshot)) is not None:
            return fleet
        log.warning("snapshot_unusable", position=snapshot.position)
        up_to = snapshot.position - 1
    return None


async def restore(log_: Log, *, up_to: int | None = None, storing: bool = False) -> Fleet:
    """The state at position `up_to` (default: the head): the newest usable snapshot, and a fold of the rest.

    `storing` is for the decider, the one who writes: a snapshot stays at each APART events that are folded. So the first start
    after an upgrade that knows none of the old ones lays the whole row anew, and one that is broken off goes on from there.
    """
    head = await log_.head()
    target = head if up_to is None else min(up_to, head)
    found = await nearest(log_, up_to=target)
    fleet = Fleet() if found is None else found
    while storing and target - fleet.position > APART:
        fleet = await fold_from(log_, fleet, fleet.position + APART)
        await store(log_, fleet)
    return await fold_from(log_, fleet, target)


async def store(log_: Log, fleet: Fleet) -> None:
    """Take a snapshot and save it. One that can't be stored is reported, and no more: it is only a short cut."""
    started = time.monotonic()
    try:
        snapshot = await asyncio.to_thread(take, fleet)
        await log_.save_snapshot(snapshot)
    except Exception as error:
        log.warning("snapshot_failed", position=fleet.position, error=repr(error))
        return
    took_ms = round((time.monotonic() - started) * 1000)
    log.info("snapshot_taken", position=fleet.position, state_bytes=len(snapshot.state), took_ms=took_ms)


async def fold_from(log_: Log, fleet: Fleet, target: int) -> Fleet:
    """Fold the events from `fleet` to position `target`; the next page is fetched while this one is folded."""
    page = asyncio.ensure_future(log_.read(fleet.position, min(PAGE, target - fleet.position)))
    collecting = gc.isenabled()
    gc.disable()  # a million new objects, none of them in a cycle: looking for cycles would double the decoding
    try:
        while fleet.position < target:
            events = await page
            if not events:
                raise LookupError(f"the log ends at {fleet.position}, {target} was expected")
            last = events[-1].position
            page = asyncio.ensure_future(log_.read(last, min(PAGE, target - last)))
            await asyncio.sleep(0)  # lets the next page's query leave
            for recorded in events:
                fleet = evolve(fleet, recorded)
        return fleet
    finally:
        if collecting:
            gc.enable()
        page.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await page


class Snapshotter:
    """Takes a snapshot when enough has happened. `note` after each commit costs nothing; `run` does the work beside."""

    def __init__(self, log_: Log, fleet: Fleet) -> None:
        self._log = log_
        self._latest = fleet
        self._taken = fleet.position
        self._taken_at = time.monotonic()
        self._due = asyncio.Event()

    def note(self, fleet: Fleet) -> None:
        self._latest = fleet
        if fleet.position - self._taken >= EVERY_EVENTS:
            self._due.set()

    async def run(self) -> None:
        """For ever. Where one can't be stored, the next one is tried when it is due."""
        stored = await self._log.snapshot(EVOLVE_VERSION)
        self._taken = 0 if stored is None else stored.position
        self.note(self._latest)  # a start that had to fold far is the last one that does
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._taken_at + EVERY_S - time.monotonic())):
                    await self._due.wait()
            self._due.clear()
            await self.take()

    async def take(self) -> None:
        """Take one now, unless nothing has happened since the last."""
        fleet, self._taken_at = self._latest, time.monotonic()
        if fleet.position == self._taken:
            return
        self._taken = fleet.position
        await store(self._log, fleet)


def _digest(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=32).digest()
