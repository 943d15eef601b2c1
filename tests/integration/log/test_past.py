"""Looking back into a log in Postgres, as web does."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from controlplane import past as looking
from controlplane.envelope import Recorded
from controlplane.fleet import EVOLVE_VERSION, Fleet, evolve, fold
from controlplane.log import snapshots, thinning
from controlplane.log.postgres import PostgresLog
from controlplane.log.snapshots import restore, take
from controlplane.moments import Position, Time
from controlplane.past import PAGE, Past
from controlplane.queries import History
from controlplane.refusal import Code, Refused
from tests.days import simulated


@pytest.fixture(scope="module")
def day() -> list[Recorded]:
    return simulated(seed=23, requests=1_200).log


@pytest.fixture
async def history(database: str, log: PostgresLog, day: list[Recorded]) -> AsyncIterator[History]:
    epoch = await log.begin_reign("h", 1)
    for start in range(0, len(day), 500):
        await log.append(epoch, day[start : start + 500])
    opened = History(database)
    yield opened
    await opened.close()


async def test_the_past_is_what_the_fold_was_with_snapshots_on_the_way(
    history: History, log: PostgresLog, day: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "NEAR", 500)
    monkeypatch.setattr(thinning, "APART", 2_000)
    past, fleet, states = Past(history), Fleet(), dict[int, Fleet]()
    for recorded in day:
        fleet = evolve(fleet, recorded)
        if recorded.position % 1_000 == 0:
            await log.save_snapshot(take(fleet))
        if recorded.position % 37 == 0 or recorded.position == len(day):
            states[recorded.position] = fleet
    for position in sorted(states, key=lambda p: (p % 7, -p)):
        moment = await past.moment(Position(position))
        assert (moment.at_ms, moment.first, moment.newest) == (day[position - 1].at_ms, 1, len(day))
        assert await past.fleet(moment) == states[position], position


class Watched(History):
    """Counts the events read to be folded."""

    folded = 0

    async def read(self, after: int, limit: int = 5000) -> list[Recorded]:
        events = await super().read(after, limit)
        self.folded += len(events) if limit > 1 else 0
        return events


async def test_after_an_upgrade_a_look_far_back_folds_no_more_than_lies_between_two_snapshots(
    history: History, log: PostgresLog, database: str, day: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is as a release that kept three left it, and `evolve` is another."""
    for module in (snapshots, thinning):
        monkeypatch.setattr(module, "APART", 1_000)
    monkeypatch.setattr(looking, "NEAR", 500)
    for back in (600, 300, 0):
        was = msgspec.structs.replace(take(fold(day[: len(day) - back])), evolve_version=EVOLVE_VERSION - 1)
        await log.save_snapshot(was)
    assert await restore(log, storing=True) == fold(day)
    watched = Watched(database)
    for position in (999, 2_999, 3_101):
        watched.folded = 0
        looked = Past(watched)
        assert await looked.fleet(await looked.moment(Position(position))) == fold(day[:position])
        assert watched.folded == position % 1_000
    await watched.close()


async def test_a_time_is_found_by_halves(history: History, day: list[Recorded]) -> None:
    past = Past(history)
    for recorded in day[100 :: len(day) // 20]:
        last = max(r.position for r in day if r.at_ms <= recorded.at_ms)
        assert (await past.moment(Time(recorded.at_ms))).position == last
        assert (await past.moment(Time(recorded.at_ms - 1))).position < recorded.position
    for beyond in (Time(day[0].at_ms - 1), Time(-62_135_596_800_000), Position(len(day) + 1)):
        with pytest.raises(Refused, match="the log begins with event 1") as refused:
            await past.moment(beyond)
        assert refused.value.code is Code.EVENT_UNKNOWN
    assert (await past.moment(Time(253_402_300_799_999))).position == len(day)


async def test_whatever_else_the_process_does_has_its_turn_at_every_page(history: History, day: list[Recorded]) -> None:
    past, turns, over = Past(history), 0, False

    async def other() -> None:
        nonlocal turns
        while not over:
            turns += 1
            await asyncio.sleep(0)

    moment = await past.moment(None)
    beside = asyncio.create_task(other())
    started = time.perf_counter()
    await past.fleet(moment)
    took, over = time.perf_counter() - started, True
    await beside
    print(f"{len(day)} events in {took * 1000:.0f} ms, {turns} turns of something else in between")
    assert turns >= len(day) // PAGE


async def test_a_database_that_is_away_is_unavailable() -> None:
    away = History("postgresql://nobody@/none?host=/nowhere")
    with pytest.raises(Refused) as refused:
        await Past(away).moment(None)
    assert (refused.value.code, refused.value.retry_after_ms) == (Code.UNAVAILABLE, 2000)
    await away.close()
