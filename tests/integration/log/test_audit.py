"""The audit finds what is wrong, and nothing where nothing is."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from nats.aio.msg import Msg

from controlplane import subjects
from controlplane.audit import audit
from controlplane.bus import Bus
from controlplane.events import DeviceDeclared, GatewayClosed, GatewayOpened, GrantGiven, InstanceCreated
from controlplane.fleet import Fleet, dump, fold
from controlplane.log.postgres import PostgresLog
from controlplane.relay import Relay
from tests.chronicle import Chronicle

EVENTS = [
    DeviceDeclared(node="n1", device="dev-0", name="cpu0", kind="cpu", size_bytes=8 << 30),
    GatewayOpened(gateway="gw_1", host="h", pid=1),
    InstanceCreated(node="n1", instance="ins_1", configuration="cfg_1"),
    GrantGiven(node="n1", device="dev-0", instance="ins_1", offset=0, cells=4),
    GatewayClosed(gateway="gw_1", code="stopped"),
]


@pytest.fixture
async def written(log: PostgresLog) -> PostgresLog:
    await log.append(await log.begin_reign("h", 1), Chronicle().record(*EVENTS))
    return log


@pytest.fixture
async def relayed(bus: Bus, written: PostgresLog) -> AsyncIterator[Relay]:
    relay = Relay(bus, written)
    running = asyncio.create_task(relay.run())
    async with asyncio.timeout(60):
        await relay.caught_up(len(EVENTS))
    yield relay
    running.cancel()


async def state_is(bus: Bus, fleet: Fleet) -> None:
    async def respond(message: Msg) -> None:
        await message.respond(dump(fleet))

    await bus.nc.subscribe(subjects.ASK_STATE, cb=respond)


async def codes(log: PostgresLog, bus: Bus | None = None) -> list[str]:
    return [finding.code for finding in (await audit(log, bus)).findings]


async def tampered(url: str, statement: str) -> None:
    """Change the tables behind the log's back, as a bug or a bad disk would."""
    connection = await asyncpg.connect(url)
    await connection.execute("set session_replication_role = replica")  # no triggers
    await connection.execute(statement)
    await connection.close()


async def test_a_sound_plane_has_no_findings(written: PostgresLog, relayed: Relay, bus: Bus) -> None:
    await state_is(bus, fold(await written.read(0)))
    report = await audit(written, bus)
    assert report.findings == ()
    assert (report.events, report.in_stream, report.cells, report.state_position) == (5, 5, 4, 5)


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("delete from event where position = 2", "gap"),
        ("update event set version = 7 where position = 2", "version"),
        ("update event set at = at - interval '1 day' where position = 3", "time"),
        ("delete from holding where cell = 2", "holding_differs"),
        ("update holding set number = 1 where cell = 2", "holding_differs"),
        ("delete from event where position = 5", "gap"),
        ("update event set data = '{}' where position = 3", "unreadable"),
        ("update event set type = 'NeverHeardOf' where position = 1", "unreadable"),
        ("update event set data = jsonb_set(data, '{instance}', '\"ins_9\"') where position = 4", "unfoldable"),
    ],
)
async def test_a_tampered_table_is_found_out(written: PostgresLog, owner_database: str, statement: str, code: str) -> None:
    await tampered(owner_database, statement)
    assert code in await codes(written)


async def test_an_event_that_can_not_be_read_hides_nothing_behind_it(written: PostgresLog, owner_database: str) -> None:
    await tampered(owner_database, "update event set data = '{}' where position = 2")
    await tampered(owner_database, "update event set at = at - interval '1 day' where position = 5")
    report = await audit(written)
    assert [(finding.code, finding.position) for finding in report.findings if finding.code != "version"] == [
        ("unreadable", 2), ("time", 5),
    ]  # fmt: skip
    assert report.events == 5


async def test_a_stream_that_nobody_fills_is_behind(
    written: PostgresLog, relayed: Relay, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.audit.STREAM_S", 0.2)
    await written.append(1, Chronicle(5).record(GatewayOpened(gateway="gw_2", host="h", pid=1)))
    assert "stream_behind" in await codes(written, bus)


async def test_two_holders_in_the_history_are_found(written: PostgresLog, owner_database: str) -> None:
    await tampered(owner_database, "delete from holding")
    both = [InstanceCreated(node="n1", instance="ins_2", configuration="cfg_1"),
            GrantGiven(node="n1", device="dev-0", instance="ins_2", offset=2, cells=2)]  # fmt: skip
    chronicle = Chronicle(5)
    chronicle._versions = {"device:dev-0": 2}
    await written.append(1, chronicle.record(*both))
    assert "two_holders" in await codes(written)


async def test_a_grant_that_never_was_is_found_when_returned(written: PostgresLog, owner_database: str) -> None:
    await tampered(owner_database, "update event set data = jsonb_set(data, '{cells}', '2') where position = 4")
    assert await codes(written) == ["holding_differs", "holding_differs"]
    await tampered(
        owner_database,
        'update event set type = \'GrantReturned\', data = \'{"node": "n1", "device": "dev-0", "instance": "i", "grant": 3}\' '
        "where position = 4",
    )
    assert "returned_unheld" in await codes(written)


async def test_a_missing_stream_and_a_silent_decider_are_found(written: PostgresLog, bus: Bus) -> None:
    assert await codes(written, bus) == ["stream_missing", "state_unavailable"]


async def test_a_stream_that_differs_is_found(written: PostgresLog, relayed: Relay, bus: Bus, owner_database: str) -> None:
    await state_is(bus, fold(await written.read(0)))
    await tampered(owner_database, "update event set actor = 'somebody' where position = 3")
    report = await audit(written, bus)
    assert [(finding.code, finding.position) for finding in report.findings] == [("stream_differs", 3)]


async def test_a_state_that_differs_is_found(written: PostgresLog, relayed: Relay, bus: Bus) -> None:
    *most, _ = await written.read(0)
    wrong = Chronicle(4).record(GatewayOpened(gateway="gw_9", host="h", pid=1))
    await state_is(bus, fold([*most, *wrong]))
    assert set(await codes(written, bus)) == {"state_differs"}
