"""What only the log in Postgres promises: privileges, triggers, races between processes, plans of the hot reads."""

import asyncio

import asyncpg
import pytest

from controlplane.events import GatewayOpened
from controlplane.log import HeadMoved
from controlplane.log.postgres import PostgresLog
from migrations import NewerSchema, upgrade
from tests.chronicle import Chronicle
from tests.integration.log.test_contract import DEVICE

CHANGES = ["update event set actor = 'me'", "delete from event", "truncate event"]


@pytest.fixture
async def written(log: PostgresLog) -> PostgresLog:
    await log.append(await log.begin_reign("here", 1), Chronicle().record(DEVICE))
    return log


@pytest.mark.parametrize("statement", [*CHANGES, "insert into event select * from event", "update head set position = 7",
                                       "update leader set epoch = 9", "delete from holding", "drop table event"])  # fmt: skip
async def test_the_planes_role_may_not_touch_the_log(written: PostgresLog, database: str, statement: str) -> None:
    connection = await asyncpg.connect(database)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute(statement)
    await connection.close()


@pytest.mark.parametrize("statement", CHANGES)
async def test_not_even_the_owner_changes_an_event(written: PostgresLog, owner_database: str, statement: str) -> None:
    connection = await asyncpg.connect(owner_database)
    with pytest.raises(asyncpg.PostgresError, match="never changed"):
        await connection.execute(statement)
    await connection.close()


async def test_room_that_a_role_may_not_try_counts_as_there(log: PostgresLog, owner_database: str) -> None:
    owner = await asyncpg.connect(owner_database)
    name = await owner.fetchval("select quote_ident(current_database())")
    await log.room()
    await owner.execute(f"revoke temporary on database {name} from public")
    try:
        await log.room()
    finally:
        await owner.execute(f"grant temporary on database {name} to public")
        await owner.close()


async def test_processes_that_race_leave_no_gap_and_no_double(log: PostgresLog, database: str) -> None:
    epoch = await log.begin_reign("here", 1)
    writers = [log, await PostgresLog.open(database), await PostgresLog.open(database)]

    async def write(name: int, writer: PostgresLog) -> int:
        lost = 0
        for turn in range(20):
            event = GatewayOpened(gateway=f"gw_{name}_{turn}", host="h", pid=turn)
            while True:
                try:
                    await writer.append(epoch, Chronicle(await writer.head()).record(event))
                    break
                except HeadMoved:
                    lost += 1
        return lost

    lost = await asyncio.gather(*(write(name, writer) for name, writer in enumerate(writers)))
    for writer in writers[1:]:
        await writer.close()
    events = await log.read(0)
    assert sum(lost) > 0, "nobody raced"
    assert [event.position for event in events] == list(range(1, 61))
    assert len({event.stream for event in events}) == 60


async def test_migrating_again_does_nothing(owner_database: str) -> None:
    assert await upgrade(owner_database) is False


async def test_a_schema_of_a_newer_release_is_refused(owner_database: str) -> None:
    connection = await asyncpg.connect(owner_database)
    await connection.execute("update alembic_version set version_num = '9999'")
    await connection.close()
    with pytest.raises(NewerSchema, match="9999"):
        await upgrade(owner_database)


ENDED = "type in ('RequestFinished', 'RequestFailed', 'RequestCancelled')"
HOT_READS = {
    "event_pkey": "select * from event where position > 5 order by position limit 100",
    "event_command_ordinal": "select * from event where command = any('{cmd_1,cmd_2}'::text[])",
    "event_stream_version": "select * from event where stream = 'node:n1' and version > 3 order by version limit 10",
    "event_ended": f"select * from event where {ENDED} order by position desc limit 50",
    "event_ended_of_model": f"select * from event where {ENDED} and data->>'model' = 'm' order by position desc limit 50",
    "event_of_operation": "select * from event where operation = 'op_1' order by position",
    "snapshot_pkey": "select * from snapshot where evolve_version = 3 and position < 9 order by position desc limit 1",
    "event_of_type": "select * from event where type = 'InstanceUp' order by position desc limit 50",
}


@pytest.mark.parametrize("index", HOT_READS)
async def test_every_hot_read_goes_by_its_index(owner_database: str, index: str) -> None:
    connection = await asyncpg.connect(owner_database)
    await connection.execute("set enable_seqscan = off; set enable_sort = off; set enable_bitmapscan = off")
    plan = "\n".join(row[0] for row in await connection.fetch(f"explain {HOT_READS[index]}"))
    await connection.close()
    assert f"using {index} " in plan, plan
