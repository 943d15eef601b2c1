"""One suite for both twins of the log."""

import asyncio

import pytest

from compose.embedded.nats import PAYLOAD_BYTES
from controlplane.envelope import encode_event, to_wire
from controlplane.events import DeviceDeclared, GatewayOpened, GrantGiven, GrantReturned, NodeFellSilent, NodeHeardAgain
from controlplane.log import (
    CellHeld,
    Conflict,
    HeadMoved,
    Log,
    MemoryLog,
    Oversized,
    Repeated,
    Snapshot,
    StaleEpoch,
    Unstorable,
)
from controlplane.log.contract import MOST_BYTES
from tests.chronicle import NOW_MS, Chronicle

DEVICE = DeviceDeclared(node="n1", device="dev-0", name="cpu0", kind="cpu", size_bytes=8 << 30)
SILENT = NodeFellSilent(node="n1")


def given(instance: str, offset: int = 0, cells: int = 8) -> GrantGiven:
    return GrantGiven(node="n1", device="dev-0", instance=instance, offset=offset, cells=cells)


def returned(instance: str, grant: int) -> GrantReturned:
    return GrantReturned(node="n1", device="dev-0", instance=instance, grant=grant)


@pytest.fixture(params=["memory", "postgres"])
def twin(request: pytest.FixtureRequest) -> Log:
    return MemoryLog() if request.param == "memory" else request.getfixturevalue("log")


@pytest.fixture
async def epoch(twin: Log) -> int:
    return await twin.begin_reign("here", 1)


async def test_what_was_appended_is_read_as_it_was(twin: Log, epoch: int) -> None:
    events = Chronicle().record(DEVICE, GatewayOpened(gateway="gw_ü", host="h\n'\"", pid=3), SILENT, operation="op_1")
    await twin.append(epoch, events)
    assert await twin.head() == 3
    assert await twin.read(0) == events
    assert await twin.read(1, limit=1) == events[1:2]
    assert await twin.of_command(events[0].command) == events
    assert await twin.of_stream("node:n1") == events[2:]
    assert await twin.of_stream("node:n1", after_version=1) == []
    assert await twin.of_commands([events[0].command, "cmd_none"]) == {events[0].command: events}


async def test_an_empty_log_answers(twin: Log) -> None:
    assert (await twin.head(), await twin.read(0), await twin.of_command("cmd_x"), (await twin.holding())[1]) == (0, [], [], {})
    assert await twin.first_since(NOW_MS) == 1
    assert await twin.snapshot(1) is None


@pytest.mark.parametrize("host", ["a\0b", "half a character: \udc80"])
async def test_what_the_log_can_not_keep_is_refused_and_nothing_is_written(twin: Log, epoch: int, host: str) -> None:
    chronicle = Chronicle()
    with pytest.raises(Unstorable):
        await twin.append(epoch, chronicle.record(DEVICE, GatewayOpened(gateway="gw_1", host=host, pid=3)))
    assert (await twin.head(), await twin.read(0)) == (0, [])
    fine = Chronicle().record(DEVICE, GatewayOpened(gateway="gw_1", host="a\\u0000b", pid=3))  # a backslash, and no NUL
    await twin.append(epoch, fine)
    assert await twin.read(0) == fine


async def test_an_event_that_the_bus_would_not_take_is_refused_with_both_numbers(twin: Log, epoch: int) -> None:
    frame = len(encode_event(GatewayOpened(gateway="gw_1", host="", pid=3)))
    largest = GatewayOpened(gateway="gw_1", host="x" * (MOST_BYTES - frame), pid=3)
    with pytest.raises(Oversized, match=f"{MOST_BYTES + 1} bytes; .* {MOST_BYTES}"):
        await twin.append(epoch, Chronicle().record(DEVICE, GatewayOpened(gateway="gw_1", host=largest.host + "x", pid=3)))
    assert await twin.head() == 0
    events = Chronicle().record(largest)
    await twin.append(epoch, events)
    assert len(to_wire(events[0])) < PAYLOAD_BYTES


async def test_each_reign_has_a_higher_epoch(twin: Log, epoch: int) -> None:
    assert await twin.begin_reign("there", 2) == epoch + 1


async def test_a_deposed_writer_is_refused_and_writes_nothing(twin: Log, epoch: int) -> None:
    await twin.begin_reign("there", 2)
    with pytest.raises(StaleEpoch):
        await twin.append(epoch, Chronicle().record(DEVICE))
    assert await twin.head() == 0


async def test_a_deposed_writer_hears_of_its_epoch_even_when_the_head_has_moved(twin: Log, epoch: int) -> None:
    newer = await twin.begin_reign("there", 2)
    await twin.append(newer, Chronicle().record(DEVICE))
    with pytest.raises(StaleEpoch):
        await twin.append(epoch, Chronicle().record(SILENT))


@pytest.mark.parametrize("after", [0, 2])
async def test_an_append_that_does_not_follow_the_head_is_refused(twin: Log, epoch: int, after: int) -> None:
    chronicle = Chronicle()
    await twin.append(epoch, chronicle.record(DEVICE))
    with pytest.raises(HeadMoved):
        await twin.append(epoch, Chronicle(after).record(SILENT))
    assert await twin.head() == 1
    await twin.append(epoch, chronicle.record(SILENT))


async def test_a_repeated_command_is_named_and_its_first_events_are_found(twin: Log, epoch: int) -> None:
    chronicle = Chronicle()
    first = chronicle.record(DEVICE, command="cmd_1")
    await twin.append(epoch, first)
    again = [*chronicle.record(SILENT, command="cmd_2"), *chronicle.record(NodeHeardAgain(node="n1"), command="cmd_1")]
    with pytest.raises(Repeated) as refusal:
        await twin.append(epoch, again)
    assert refusal.value.commands == {"cmd_1"}
    assert await twin.of_command("cmd_1") == first
    assert await twin.head() == 1


async def test_a_version_is_taken_once(twin: Log, epoch: int) -> None:
    await twin.append(epoch, Chronicle().record(DEVICE))
    with pytest.raises(Conflict):
        await twin.append(epoch, Chronicle(1).record(DEVICE))


async def test_positions_within_a_batch_must_follow_each_other(twin: Log, epoch: int) -> None:
    chronicle = Chronicle()
    first, _, third = chronicle.record(DEVICE, SILENT, NodeHeardAgain(node="n1"))
    with pytest.raises(Conflict):
        await twin.append(epoch, [first, third])
    assert await twin.head() == 0


async def test_a_cell_has_one_holder(twin: Log, epoch: int) -> None:
    chronicle = Chronicle()
    await twin.append(epoch, chronicle.record(given("a", 0, 4)))
    with pytest.raises(CellHeld):
        await twin.append(epoch, chronicle.record(SILENT, given("b", 2, 2)))
    assert await twin.head() == 1
    assert await twin.holding() == (1, {("dev-0", cell): 1 for cell in range(4)})


async def test_two_grants_of_one_batch_cannot_share_a_cell(twin: Log, epoch: int) -> None:
    with pytest.raises(CellHeld):
        await twin.append(epoch, Chronicle().record(given("a", 0, 2), given("b", 0, 1)))
    assert await twin.holding() == (0, {})


async def test_cells_change_hands_within_one_batch(twin: Log, epoch: int) -> None:
    chronicle = Chronicle()
    await twin.append(epoch, chronicle.record(given("a")))
    await twin.append(epoch, chronicle.record(returned("a", 1), given("b", 0, 2), given("c", 2, 2), returned("c", 4)))
    assert await twin.holding() == (5, {("dev-0", 0): 3, ("dev-0", 1): 3})


async def test_a_grant_that_held_nothing_cannot_be_returned(twin: Log, epoch: int) -> None:
    with pytest.raises(Conflict):
        await twin.append(epoch, Chronicle().record(returned("a", 17)))
    assert await twin.head() == 0


async def test_ten_thousand_events_in_one_batch(twin: Log, epoch: int) -> None:
    chronicle = Chronicle()
    events = chronicle.record(DEVICE, *[SILENT, NodeHeardAgain(node="n1")] * 5000)
    await twin.append(epoch, events)
    assert await twin.head() == 10_001
    assert [event.position for event in await twin.read(0, 20_000)] == list(range(1, 10_002))


async def test_time_finds_the_first_event_of_a_span(twin: Log, epoch: int) -> None:
    await twin.append(epoch, Chronicle().record(DEVICE, SILENT, NodeHeardAgain(node="n1")))
    assert [await twin.first_since(NOW_MS + at) for at in (0, 1, 2, 3, 4)] == [1, 1, 2, 3, 4]


async def stored(twin: Log, evolve_version: int) -> list[int]:
    """Positions of the snapshots of a version, newest first."""
    found, up_to = list[int](), 10**9
    while (snapshot := await twin.snapshot(evolve_version, up_to=up_to)) is not None:
        found.append(snapshot.position)
        up_to = snapshot.position - 1
    return found


async def save(twin: Log, evolve_version: int, *positions: int) -> None:
    for position in positions:
        await twin.save_snapshot(Snapshot(position, evolve_version, b"\x00state", b"digest"))


async def test_a_snapshot_is_found_by_its_version_between_two_places(twin: Log) -> None:
    await save(twin, 1, 10, 20)
    await save(twin, 2, 30)
    await save(twin, 1, 40, 40)
    assert await twin.snapshot(2) == Snapshot(30, 2, b"\x00state", b"digest")
    assert await stored(twin, 1) == [40, 20, 10]
    for after, up_to, found in ((0, 25, 20), (0, 20, 20), (0, 19, 10), (10, 19, None), (20, None, 40), (40, None, None)):
        snapshot = await twin.snapshot(1, after=after, up_to=up_to)
        assert (snapshot and snapshot.position) == found, (after, up_to)


async def test_of_the_oldest_snapshots_a_thin_row_stays(twin: Log) -> None:
    await save(twin, 1, *range(20_000, 500_001, 20_000))
    assert await stored(twin, 1) == [500_000, 480_000, 460_000, 400_000, 300_000, 200_000, 100_000]


async def test_an_upgrade_leaves_no_snapshot_behind_and_lays_a_row_of_its_own(twin: Log) -> None:
    await save(twin, 1, *range(20_000, 500_001, 20_000))
    await save(twin, 2, 100_000)
    assert (await stored(twin, 1), await stored(twin, 2)) == ([500_000, 480_000, 460_000], [100_000])
    await save(twin, 2, *range(200_000, 500_001, 100_000), 520_000)
    assert await stored(twin, 1) == [500_000], "whoever goes back to the release before starts from there"
    await save(twin, 2, 540_000)
    assert await stored(twin, 1) == []
    assert await stored(twin, 2) == [540_000, 520_000, 500_000, 400_000, 300_000, 200_000, 100_000]


async def test_writers_that_race_leave_no_gap_and_no_double(twin: Log, epoch: int) -> None:
    async def write(name: str) -> None:
        for turn in range(15):
            while True:
                after = await twin.head()
                events = Chronicle(after).record(
                    *[GatewayOpened(gateway=f"gw_{name}{turn}_{n}", host="h", pid=n) for n in range(1 + turn % 3)]
                )
                try:
                    await twin.append(epoch, events)
                except HeadMoved:
                    await asyncio.sleep(0)
                    continue
                break

    # One connection appends, so the twin in Postgres is raced by two more of its kind in test_postgres.
    await write("a")
    await write("b")
    events = await twin.read(0)
    assert [event.position for event in events] == list(range(1, len(events) + 1))
    assert len({event.stream for event in events}) == len(events) == 60
