"""What a command costs, beside what the disk and the bus alone cost, in the same run.

    python -m tests.bench.bench_log [--seconds 5] [--only process nats fold start]

`start` (left out by default: it fills the log for minutes) starts a decider on five million events. Servers are our
own, on the disk under --directory, with fsync on. The commands are real admissions of a model that is up.
"""

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import msgspec

from compose.embedded.nats import EmbeddedNats
from compose.embedded.postgres import OWNER, EmbeddedPostgres
from controlplane import ids, subjects
from controlplane.bus import Bus
from controlplane.commands import Admit, End, EndRequests, Order
from controlplane.decisions import decide
from controlplane.desk import Desk
from controlplane.fleet import Fleet
from controlplane.log.postgres import PostgresLog
from controlplane.log.snapshots import fold_from, restore, take
from controlplane.plane import Plane
from controlplane.refusal import Refused
from migrations import upgrade
from tests.bench.figures import Table
from tests.unit.decisions.spec import plane as story_of_a_plane
from tests.unit.decisions.spec import spec, with_models

MODEL, GATEWAY, NODE = "m", "gw_1", "n1"
ECHO = "bench.echo"
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


def admit() -> Order:
    body = Admit(request=ids.new(ids.REQUEST), model=MODEL, gateway=GATEWAY, kind="chat", streamed=True, prompt_bytes=99)
    return Order(id=ids.new(ids.COMMAND), actor=f"gateway:{GATEWAY}", body=body)


def finish(requests: list[str]) -> Order:
    ends = tuple(End(request=request, outcome="finished", finish_reason="stop") for request in requests)
    return Order(id=ids.new(ids.COMMAND), actor=f"gateway:{GATEWAY}", body=EndRequests(ends=ends))


async def stage(log: PostgresLog) -> Fleet:
    """A plane with one model up, as events in an empty log."""
    story = with_models(story_of_a_plane(), spec(MODEL)).bring_up(MODEL)
    await log.append(await log.begin_reign("bench", 1), story.log)
    return story.fleet


async def admissions(ask: Callable[[Order], Awaitable[object]], seconds: float, in_flight: int) -> tuple[list[float], float]:
    """Admit, finish, admit ... with so many in flight; return the admissions' times and the seconds it took."""
    took, until = list[float](), time.perf_counter() + seconds
    ended = list[str]()

    async def one() -> None:
        while time.perf_counter() < until:
            order = admit()
            started = time.perf_counter()
            await ask(order)
            took.append(time.perf_counter() - started)
            ended.append(order.body.request)  # type: ignore[union-attr]
            if len(ended) >= 16:
                batch = ended.copy()
                ended.clear()
                await ask(finish(batch))

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(in_flight)))
    return took, time.perf_counter() - began


def synced(directory: Path, seconds: float) -> list[float]:
    """Times of appending 8 KiB to a file and fdatasync."""
    took, block = list[float](), os.urandom(8192)
    descriptor = os.open(directory / "sync", os.O_WRONLY | os.O_CREAT, 0o600)
    until = time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        os.write(descriptor, block)
        os.fdatasync(descriptor)
        took.append(time.perf_counter() - started)
    os.close(descriptor)
    return took


async def repeated(work: Callable[[], Awaitable[object]], seconds: float) -> list[float]:
    took, until = list[float](), time.perf_counter() + seconds
    while (started := time.perf_counter()) < until:
        await work()
        took.append(time.perf_counter() - started)
    return took


async def in_process(database: "Databases", seconds: float) -> None:
    log = await PostgresLog.open(await database.fresh())
    desk = Desk(log, await stage(log), 1, decide)
    running = asyncio.create_task(desk.run())
    bare = await asyncpg.connect(await database.bare())
    table = Table("reserve in process (decide, append, commit)")
    table.timed("fdatasync of 8 KiB", await asyncio.to_thread(synced, database.directory, seconds / 2))
    table.timed("bare single-row commit", await repeated(lambda: bare.execute("insert into bare values (1)"), seconds))
    for in_flight, goal in ((1, ""), (8, "goal: p50 < 1 ms")):
        cpu = time.process_time()
        took, span = await admissions(desk.submit, seconds, in_flight)
        cpu = time.process_time() - cpu
        table.timed(f"admit, {in_flight} in flight", took, goal)
        rate = f"{len(took) / span:8.0f} admissions/s (each also finished), {cpu / len(took) * 1e6:.0f} us of CPU each"
        table.figure(f"    sustained at {in_flight}", rate)
    table.show()
    desk.close()
    await running
    await bare.close()
    await log.close()


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(sys.executable, *arguments, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield started
    finally:
        started.terminate()
        await started.wait()


async def beating(bus: Bus) -> None:
    """A worker's and a gateway's beats, without which both would be taken for dead."""
    while True:
        beat = subjects.NodeBeat(
            node=NODE, incarnation="inc_1", at_ms=0, pool_used_bytes=0, pool_budget_bytes=0, pool_ok=True, device_bytes={}
        )
        await bus.publish(subjects.beat_node(NODE), beat)
        await bus.publish(subjects.beat_gateway(GATEWAY), subjects.GatewayBeat(gateway=GATEWAY, at_ms=0))
        await asyncio.sleep(0.5)


async def answering(bus: Bus) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                await bus.state(timeout_s=1)
                return
            except Refused:
                await asyncio.sleep(0.01)


async def across_nats(database: "Databases", nats: EmbeddedNats, seconds: float) -> None:
    url = await database.fresh()
    log = await PostgresLog.open(url)
    await stage(log)
    await log.close()
    plane = database.plane(url, nats)
    bus = await Bus.connect(plane, "bench")
    beats = asyncio.create_task(beating(bus))
    table = Table("across NATS (the decider in its own process)")
    async with process("-m", "tests.bench.echo", nats.url, nats.token, ECHO, await database.bare()):
        async with asyncio.timeout(20):
            await ready(bus)
        echoed = table.timed("bare round trip + single-row commit", await repeated(lambda: bus.nc.request(ECHO, b"x"), seconds))
    async with process("-m", "controlplane.decider", "--data", plane.data):
        await answering(bus)

        async def ask(order: Order) -> object:
            return await bus.command(subjects.COMMAND_GATEWAY, order)

        for in_flight in (1, 8, 32):
            took, span = await admissions(ask, seconds, in_flight)
            goal = f"goal: p50 <= {3 * echoed:.3f} ms (3 x)" if in_flight == 1 else ""
            table.timed(f"admit, {in_flight} in flight", took, goal)
            rate = f"{len(took) / span:8.0f} admissions/s (each also finished)"
            table.figure(f"    sustained at {in_flight}", rate, "goal: >= 300/s" if in_flight == 8 else "")
    table.show()
    beats.cancel()
    await bus.close()


async def ready(bus: Bus) -> None:
    while True:
        try:
            await bus.nc.request(ECHO, b"x", timeout=1)
            return
        except Exception:
            await asyncio.sleep(0.02)


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


async def folding(database: "Databases", events: int) -> None:
    url = await database.fresh()
    log, _ = await history(url, database.owner(url), events)
    head = await log.head()
    started, cpu = time.perf_counter(), time.process_time()
    fleet = await fold_from(log, Fleet(), head)
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    table = Table("fold")
    table.figure(f"{head:,} events out of Postgres", f"{took:8.2f} s ({cpu:.2f} s of CPU)", "goal: < 10 s for a million")
    table.show()
    assert fleet.position == head
    await log.close()


async def starting(database: "Databases", nats: EmbeddedNats, events: int) -> None:
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
    bus = await Bus.connect(plane, "bench")
    started = time.perf_counter()
    async with process("-m", "controlplane.decider", "--data", plane.data):
        await answering(bus)
        took = time.perf_counter() - started
    await bus.close()
    table = Table(f"start of a decider on {head:,} events, snapshot 18,000 events back")
    table.figure("restore alone", f"{folded:8.2f} s")
    table.figure("process started to first answer", f"{took:8.2f} s", "goal: < 3 s")
    table.show()


class Databases:
    """Fresh databases of one server."""

    def __init__(self, directory: Path, server: EmbeddedPostgres) -> None:
        self.directory, self._server, self._count = directory, server, 0

    async def fresh(self) -> str:
        self._count += 1
        admin = await asyncpg.connect(self._server.url_of("postgres", OWNER))
        await admin.execute(f"create database bench_{self._count}")
        await admin.close()
        await upgrade(self._server.url_of(f"bench_{self._count}", OWNER))
        return self._server.url_of(f"bench_{self._count}")

    def owner(self, url: str) -> str:
        return url.replace("enginehouse@", f"{OWNER}@")

    async def bare(self) -> str:
        """A database with one table of one column."""
        url = self.owner(self._server.url)
        connection = await asyncpg.connect(url)
        await connection.execute("create table if not exists bare (n integer)")
        await connection.close()
        return url

    def plane(self, url: str, nats: EmbeddedNats) -> Plane:
        data = self.directory / f"plane_{self._count}"
        data.mkdir(exist_ok=True)
        written = Plane(data=str(data), postgres_url=url, nats_url=nats.url, nats_token=nats.token)
        written.write()
        return written


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="length of each measurement")
    parser.add_argument("--directory", default="/var/tmp", help="where the disk to measure is")
    parser.add_argument("--only", nargs="+", default=["process", "nats", "fold"], choices=["process", "nats", "fold", "start"])
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="eh-bench-", dir=arguments.directory))
    directory.chmod(0o711)
    try:
        async with (
            EmbeddedPostgres(directory / "p", home=directory / "pg") as postgres,
            EmbeddedNats(directory / "nats") as nats,
        ):
            database = Databases(directory, postgres)
            if "process" in arguments.only:
                await in_process(database, arguments.seconds)
            if "nats" in arguments.only:
                await across_nats(database, nats, arguments.seconds)
            if "fold" in arguments.only:
                await folding(database, 1_000_000)
            if "start" in arguments.only:
                await starting(database, nats, 5_000_000)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(main())
