"""The past is what the fold was there, wherever it is folded from; and no look costs more than it must."""

import asyncio
import random
from collections.abc import Sequence

import msgspec
import pytest

from controlplane import past as looking
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet, evolve
from controlplane.log import MemoryLog, Snapshot
from controlplane.log.snapshots import take
from controlplane.moments import Position, Time
from controlplane.past import FAR, NEAR, PAGE, Past, States
from controlplane.refusal import Code, Refused
from tests.days import simulated


class Watched(MemoryLog):
    """Counts the events read to be folded, and can be made to lack its beginning, or to get stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.folded = self.reading = self.most_reading = 0
        self.pruned_to = 0
        self.stuck_at: int | None = None

    async def read(self, after: int, limit: int = 5000) -> list[Recorded]:
        if limit > 1:
            self.reading += 1
            self.most_reading = max(self.most_reading, self.reading)
            await asyncio.sleep(0)
            if after == self.stuck_at:
                await asyncio.Event().wait()
            self.reading -= 1
        events = await super().read(max(after, self.pruned_to), limit)
        self.folded += len(events) if limit > 1 else 0
        return events


@pytest.fixture(scope="module")
def day() -> Sequence[Recorded]:
    return simulated(seed=11, requests=500).log


@pytest.fixture(scope="module")
def states(day: Sequence[Recorded]) -> list[Fleet]:
    """What the fold has been after each event, by position."""
    found = [Fleet()]
    for recorded in day:
        found.append(evolve(found[-1], recorded))
    return found


@pytest.fixture
async def log(day: Sequence[Recorded]) -> Watched:
    log = Watched()
    await log.append(await log.begin_reign("h", 1), list(day))
    return log


async def at(past: Past, position: int) -> Fleet:
    return await past.fleet(await past.moment(Position(position)))


@pytest.mark.parametrize("order", ["forwards", "backwards", "anyhow"])
async def test_the_past_at_every_position_is_what_the_fold_had_there(
    log: Watched, states: list[Fleet], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "NEAR", 300)
    monkeypatch.setattr(looking, "PAGE", 50)
    for position in (len(states) // 3, len(states) // 2):
        await log.save_snapshot(take(states[position]))
    positions = list(range(1, len(states)))[:: -1 if order == "backwards" else 1]
    if order == "anyhow":
        random.Random(5).shuffle(positions)
    past = Past(log)
    for position in positions:
        assert await at(past, position) == states[position], position


async def test_the_nearest_snapshot_is_folded_from(log: Watched, states: list[Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "NEAR", 100)
    for position in (400, 900):
        await log.save_snapshot(take(states[position]))
    assert await at(Past(log), 1_000) == states[1_000]
    assert log.folded == 100


async def test_a_damaged_snapshot_is_passed_over(log: Watched, states: list[Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "NEAR", 100)
    good = take(states[900])
    damaged = Snapshot(900, good.evolve_version, good.state[:-1] + bytes([good.state[-1] ^ 1]), good.digest)
    await log.save_snapshot(take(states[400]))
    await log.save_snapshot(damaged)
    assert await at(Past(log), 1_000) == states[1_000]
    assert log.folded == 600


async def test_who_goes_on_from_a_look_folds_a_page_at_most(log: Watched, states: list[Fleet]) -> None:
    past, position = Past(log), 1_500
    assert await at(past, position) == states[position]
    for step in (-1, -1, +1, -10, +100, -100, -100, +10):
        position, log.folded = position + step, 0
        assert await at(past, position) == states[position]
        assert log.folded <= PAGE, step


def test_the_states_kept_are_few_and_those_that_serve_stay() -> None:
    states = States(most=3)
    for position in (10, 20, 30):
        states.keep(Fleet(position=position))
    assert states.below(15).position == 10
    states.keep(Fleet(position=40))
    assert [states.below(position).position for position in (9, 19, 29, 39, 99)] == [0, 10, 10, 30, 40]
    assert FAR % PAGE == NEAR % PAGE == 0


async def test_without_a_moment_it_is_the_newest(log: Watched, states: list[Fleet], day: Sequence[Recorded]) -> None:
    moment = await Past(log).moment(None)
    assert (moment.position, moment.at_ms, moment.first, moment.newest) == (len(day), day[-1].at_ms, 1, len(day))


async def test_a_time_means_the_last_event_at_or_before_it(log: Watched, day: Sequence[Recorded]) -> None:
    past = Past(log)
    for recorded in day[:: len(day) // 40]:
        for at_ms in (recorded.at_ms, recorded.at_ms + 1):
            last = max(r.position for r in day if r.at_ms <= at_ms)
            assert (await past.moment(Time(at_ms))).position == last
    assert (await past.moment(Time(day[-1].at_ms + 10**9))).position == len(day), "nothing has happened since"


async def test_where_there_is_no_event_is_refused_with_what_there_is(log: Watched, day: Sequence[Recorded]) -> None:
    for beyond in (Position(0), Position(len(day) + 1), Position(10**60), Time(day[0].at_ms - 1)):
        with pytest.raises(Refused, match=f"the log begins with event 1, .* UTC, and its newest is {len(day)}") as refused:
            await Past(log).moment(beyond)
        assert refused.value.code is Code.EVENT_UNKNOWN
    with pytest.raises(Refused, match="nothing has happened yet"):
        await Past(MemoryLog()).moment(None)


async def test_of_a_log_without_its_beginning_what_snapshots_reach_is_shown(
    log: Watched, states: list[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "NEAR", 100)
    log.pruned_to = 600
    await log.save_snapshot(take(states[800]))
    past = Past(log)
    assert (await past.moment(None)).first == 601
    with pytest.raises(Refused, match="the log begins with event 601") as refused:
        await past.moment(Position(600))
    assert refused.value.code is Code.EVENT_UNKNOWN
    with pytest.raises(Refused, match="can't be had any more") as refused:
        await at(past, 700)
    assert refused.value.code is Code.EVENT_UNKNOWN
    assert await at(past, 950) == states[950]


async def test_what_takes_too_long_is_refused_and_goes_on_where_it_was(log: Watched, states: list[Fleet]) -> None:
    past = Past(log, deadline_s=1)
    moment = await past.moment(Position(1_500))
    log.stuck_at = 800
    with pytest.raises(Refused, match="700 events are still to be folded") as refused:
        await past.fleet(moment)
    assert (refused.value.code, refused.value.details["left"]) == (Code.UNAVAILABLE, 700)
    log.stuck_at = None
    assert await past.fleet(moment) == states[1_500]
    assert log.folded == 1_500, "what was folded before its time was up is not folded again"


async def test_few_look_at_once_and_the_others_have_their_turn(log: Watched, states: list[Fleet]) -> None:
    past = Past(log)
    found = await asyncio.gather(*(at(past, position) for position in range(300, 1_500, 100)))
    assert found == [states[position] for position in range(300, 1_500, 100)]
    assert log.most_reading <= looking.LOOKS


async def test_a_log_that_ends_before_its_head_is_said_to_be_wrong(log: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = msgspec.structs.replace(await Past(log).moment(None), position=10**6)
    with pytest.raises(Refused, match="enginehouse audit") as refused:
        await Past(log).fleet(moment)
    assert refused.value.code is Code.FAULT
