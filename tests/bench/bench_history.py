"""A long log: folding a million events, looking back into it, and starting a decider on five million with a snapshot.

`python -m tests.bench.bench_history [fold] [past] [start]`. Filling the log of `start` takes minutes.
"""

import asyncio
import gc
import statistics
import sys
import time
from pathlib import Path

import asyncpg
import msgspec

from compose.embedded.nats import EmbeddedNats
from controlplane.bus import Bus
from controlplane.fleet import Fleet
from controlplane.log.postgres import PostgresLog
from controlplane.log.snapshots import fold_from, restore, take
from controlplane.log.thinning import APART
from controlplane.moments import Position
from controlplane.parties import DECIDER
from controlplane.past import Past
from controlplane.queries import History
from tests.bench.figures import Table, percentile_ms
from tests.bench.imports import import_s
from tests.bench.logroom import Databases, answering, process, servers, stage

PATTERN = """
insert into event (position, stream, version, type, v, at, command, ordinal, actor, data)
select {first} + 3 * n + k, 'request:req_' || n, k + 1, (array['RequestAccepted', 'RequestRouted', 'RequestFinished'])[k + 1], 1,
       timestamptz '2026-11-01' + n * interval '10 ms', 'cmd_p' || n || '_' || (k / 2), k % 2, 'gateway:gw_1',
       (case k
        when 0 then '{{"request": "req_' || n || '", "model": "m", "gateway": "gw_1", "kind": "chat", "streamed": true, "prompt_bytes": 99}}'
        when 1 then '{{"request": "req_' || n || '", "model": "m", "instance": "{instance}", "runs_on": "n1", "grant": {grant}, "endpoint": "http://here"}}'
        else '{{"request": "req_' || n || '", "model": "m", "kind": "chat", "streamed": true, "accepted_ms": 1, "finish_reason": "stop"}}'
        end)::jsonb
from generate_series({low}, {high} - 1) as n, generate_series(0, 2) as k order by n, k
"""  # noqa: E501


async def history(url: str, owner: str, events: int) -> tuple[PostgresLog, Fleet]:
    """Fill a log up to about `events` events of requests that came and went; return it with the state of its beginning."""
    log = await PostgresLog.open(url)
    fleet = await stage(log)
    instance = next(iter(fleet.instances.values()))
    connection = await asyncpg.connect(owner)
    await connection.execute("alter table event drop constraint event_command_ordinal, drop constraint event_stream_version")
    for index in ("event_of_operation", "event_of_type", "event_ended", "event_ended_of_model"):
        await connection.execute(f"drop index {index}")
    count = (events - fleet.position) // 3
    for low in range(0, count, 100_000):
        high = min(low + 100_000, count)
        first = fleet.position + 1
        filled = PATTERN.format(first=first, low=low, high=high, instance=instance.instance, grant=instance.grant)
        await connection.execute(filled, timeout=600)
    await connection.execute(
        "alter table event add constraint event_command_ordinal unique (command, ordinal), "
        "add constraint event_stream_version unique (stream, version)", timeout=600,
    )  # fmt: skip
    await connection.execute(f"update head set position = {fleet.position + 3 * count}")
    await connection.execute("analyze event", timeout=600)
    await connection.close()
    return log, fleet


async def folding(database: Databases, events: int) -> Table:
    url = await database.fresh()
    log, _ = await history(url, database.owner(url), events)
    head = await log.head()
    started, cpu = time.perf_counter(), time.process_time()
    fleet = await fold_from(log, Fleet(), head)
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    gc.disable()  # as folding does
    started, after = time.perf_counter(), 0
    while events_read := await log.read(after):
        after = events_read[-1].position
    read = time.perf_counter() - started
    gc.enable()
    table = Table("fold")
    table.figure(f"{head:,} events out of Postgres", f"{took:8.2f} s ({cpu:.2f} s of CPU)")
    table.figure("read without folding", f"{read:8.2f} s")
    table.row(
        f"fold of {head / 1e6:.1f} million events",
        "< 10 s",
        f"{took:.1f} s ({cpu:.1f} s of CPU)",
        f"reading and decoding them alone {read:.1f} s",
    )
    table.show()
    assert fleet.position == head
    await log.close()
    return table


async def looked(url: str, position: int) -> tuple[float, list[float]]:
    """Seconds of a process's first look there, and how late what wanted to run each millisecond came meanwhile."""
    history, late = History(url), list[float]()
    past = Past(history, deadline_s=600)
    moment = await past.moment(Position(position))

    async def each_ms() -> None:
        while True:
            due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - due)

    beside = asyncio.create_task(each_ms())
    started = time.perf_counter()
    fleet = await past.fleet(moment)
    took = time.perf_counter() - started
    beside.cancel()
    await history.close()
    assert fleet.position == position
    return took, late


async def looking_back(database: Databases, events: int) -> Table:
    url = await database.fresh()
    log, _ = await history(url, database.owner(url), events)
    head = await log.head()
    table = Table(f"looks into {head:,} events, each the first of a process; medians of 3")

    async def look(what: str, position: int) -> float:
        looks = [await looked(url, position) for _ in range(3)]
        took, late = statistics.median(took for took, _ in looks), [one for _, late in looks for one in late]
        beside = f"beside it p99 {percentile_ms(late, 0.99):.1f} ms late, at most {max(late) * 1000:.1f} ms, n {len(late)}"
        table.figure(f"{what}, event {position:,}", f"{took:8.3f} s", beside)
        return took

    middle = head // 2
    before = await look("without a snapshot below it", middle)
    starts = list[float]()
    for storing in (False, True):
        started = time.perf_counter()
        await restore(log, storing=storing)
        starts.append(time.perf_counter() - started)
    table.figure("a start that folds all of it", f"{starts[0]:8.2f} s", f"and lays the row: {starts[1]:.2f} s")
    after = await look("with the row", middle)
    await look("with the row, half as far from a snapshot", middle // APART * APART + APART // 2)
    owner = await asyncpg.connect(database.owner(url))
    event, kept, count = await owner.fetchrow(
        "select pg_total_relation_size('event'), (select sum(length(state)) from snapshot), (select count(*) from snapshot)"
    )
    await owner.close()
    table.figure("the log takes", f"{event / head:8.0f} bytes an event", f"and its {count} snapshots {kept:,} bytes")
    figure = f"first look at the middle of {head / 1e6:.1f} million events"
    yardstick = f"without a row of snapshots {before:.2f} s; {middle % APART:,} events lie between it and the nearest"
    table.row(figure, "(stated)", f"{after:.2f} s", yardstick)
    table.show()
    await log.close()
    return table


async def starting(database: Databases, nats: EmbeddedNats, events: int) -> Table:
    url = await database.fresh()
    log, fleet = await history(url, database.owner(url), events)
    head = await log.head()
    snapshot = take(msgspec.structs.replace(fleet, position=head - 3 * 6_000))  # between requests: nothing is open
    await log.save_snapshot(snapshot)
    started = time.perf_counter()
    await restore(log)
    folded = time.perf_counter() - started
    await log.close()
    plane = database.plane(url, nats)
    bus = await Bus.connect(plane, "bench", DECIDER)
    started = time.perf_counter()
    async with process("-m", "controlplane.decider", "--data", plane.data):
        await answering(bus)
        took = time.perf_counter() - started
    await bus.close()
    imports = await import_s("controlplane.decider")
    table = Table(f"start of a decider on {head:,} events, snapshot 18,000 events back")
    table.figure("restore alone", f"{folded:8.2f} s")
    table.figure("process started to first answer", f"{took:8.2f} s")
    table.figure("its imports alone", f"{imports:8.2f} s")
    yardstick = f"its imports alone {imports:.2f} s; the snapshot is 18,000 events back, restoring it {folded:.2f} s"
    table.row(f"start of a decider on {head / 1e6:.0f} million events", "< 3 s", f"{took:.2f} s", yardstick)
    table.show()
    return table


async def measure(*parts: str, directory: Path = Path("/var/tmp")) -> list[Table]:
    """`fold`, `past`, `start`; without a name all of them."""
    tables = []
    async with servers(directory) as (database, nats):
        if "fold" in parts or not parts:
            tables.append(await folding(database, 1_000_000))
        if "past" in parts or not parts:
            tables.append(await looking_back(database, 1_000_000))
        if "start" in parts or not parts:
            tables.append(await starting(database, nats, 5_000_000))
    return tables


if __name__ == "__main__":
    asyncio.run(measure(*sys.argv[1:]))
