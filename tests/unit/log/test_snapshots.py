"""Snapshots are a short cut, never the truth."""

import asyncio

import msgspec
import pytest

from controlplane.events import GatewayOpened
from controlplane.fleet import EVOLVE_VERSION, Fleet, fold
from controlplane.log import Full, MemoryLog, Snapshot, snapshots, thinning
from controlplane.log.snapshots import Snapshotter, restore, take, usable
from tests.chronicle import Chronicle


class Counting(MemoryLog):
    """Counts the events read. Can be made to fail: at reading past a place, or at keeping snapshots."""

    events_read = 0
    fails_after = 10**9
    full = False

    async def read(self, after: int, limit: int = 5000) -> list:  # type: ignore[type-arg]
        if after >= self.fails_after:
            raise OSError("away")
        events = await super().read(after, limit)
        self.events_read += len(events)
        return events

    async def save_snapshot(self, snapshot: Snapshot) -> None:
        if self.full:
            raise Full("no room")
        await super().save_snapshot(snapshot)


@pytest.fixture
async def log() -> Counting:
    log = Counting()
    opened = [GatewayOpened(gateway=f"gw_{n}", host="h", pid=n) for n in range(30)]
    await log.append(await log.begin_reign("h", 1), Chronicle().record(*opened))
    return log


async def at(log: MemoryLog, position: int) -> Fleet:
    return fold((await log.read(0))[:position])


async def test_a_start_reads_the_newest_snapshot_and_only_the_rest(log: Counting) -> None:
    for position in (10, 20):
        await log.save_snapshot(take(await at(log, position)))
    whole = await at(log, 30)
    log.events_read = 0
    assert await restore(log) == whole
    assert log.events_read == 10


async def test_the_past_is_restored_from_the_snapshot_before_it(log: Counting) -> None:
    for position in (10, 20):
        await log.save_snapshot(take(await at(log, position)))
    past = await at(log, 15)
    log.events_read = 0
    assert await restore(log, up_to=15) == past
    assert log.events_read == 5


async def test_an_empty_log_is_an_empty_fleet() -> None:
    assert await restore(MemoryLog()) == Fleet()


@pytest.mark.parametrize("damage", ["state", "digest", "version", "position", "not_json"])
async def test_a_snapshot_that_is_damaged_or_of_another_meaning_is_passed_over(log: Counting, damage: str) -> None:
    good = take(await at(log, 20))
    match damage:
        case "state":
            bad = msgspec.structs.replace(good, state=good.state[:-1] + bytes([good.state[-1] ^ 1]))
        case "digest":
            bad = msgspec.structs.replace(good, digest=b"")
        case "version":
            bad = msgspec.structs.replace(good, evolve_version=good.evolve_version + 1)
        case "position":
            bad = msgspec.structs.replace(good, position=21)
        case _:
            bad = Snapshot(20, good.evolve_version, b"{", take(Fleet()).digest)
    assert usable(bad) is None
    await log.save_snapshot(take(await at(log, 10)))
    await log.save_snapshot(bad)
    assert await restore(log) == await at(log, 30)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (snapshots, thinning):
        monkeypatch.setattr(module, "APART", 8)
    return 8


async def stored(log: MemoryLog) -> list[int]:
    """Positions of the snapshots that are what the fold was there."""
    found = [await log.snapshot(EVOLVE_VERSION, after=position - 1, up_to=position) for position in range(1, 31)]
    return [one.position for one in found if one is not None and usable(one) == await at(log, one.position)]


async def test_a_start_after_an_upgrade_lays_the_row_anew_as_it_folds(log: Counting, apart: int) -> None:
    await log.save_snapshot(msgspec.structs.replace(take(await at(log, 28)), evolve_version=EVOLVE_VERSION - 1))
    assert await restore(log) == await at(log, 30)
    assert await stored(log) == [], "who only reads leaves nothing"
    assert await restore(log, storing=True) == await at(log, 30)
    assert await stored(log) == [8, 16, 24]


async def test_a_start_that_is_broken_off_goes_on_from_where_it_was(log: Counting, apart: int) -> None:
    log.fails_after = 20
    with pytest.raises(OSError, match="away"):
        await restore(log, storing=True)
    log.fails_after, whole = 10**9, await at(log, 30)
    log.events_read = 0
    assert await restore(log, storing=True) == whole
    assert log.events_read == 30 - 16


async def test_a_start_that_can_store_nothing_folds_all_the_same(log: Counting, apart: int) -> None:
    log.full = True
    assert await restore(log, storing=True) == await at(log, 30)
    assert await stored(log) == []


async def test_one_is_taken_only_when_something_happened(log: Counting) -> None:
    fleet = await at(log, 20)
    snapshotter = Snapshotter(log, fleet)
    await snapshotter.take()
    assert await log.snapshot(EVOLVE_VERSION) is None
    snapshotter.note(await at(log, 30))
    await snapshotter.take()
    taken = await log.snapshot(EVOLVE_VERSION)
    assert taken is not None and usable(taken) == await at(log, 30)


async def test_a_start_that_had_to_fold_far_is_the_last_one_that_does(log: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY_EVENTS", 5)
    running = asyncio.create_task(Snapshotter(log, await restore(log)).run())
    async with asyncio.timeout(20):
        while await log.snapshot(EVOLVE_VERSION) is None:
            await asyncio.sleep(0.001)
    running.cancel()
    log.events_read = 0
    await restore(log)
    assert log.events_read == 0
