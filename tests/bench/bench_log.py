"""What a command costs, beside what the disk and the bus alone cost, in the same run.

    python -m tests.bench.bench_log [--seconds 5] [--directory /var/tmp]

The commands are real admissions of a model that is up.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg

from compose.embedded.nats import EmbeddedNats
from controlplane import subjects
from controlplane.bus import Bus
from controlplane.commands import Order
from controlplane.decisions import decide
from controlplane.desk import Desk
from controlplane.log.postgres import PostgresLog
from controlplane.parties import DECIDER
from tests.bench.figures import Table
from tests.bench.logroom import Databases, admit, answering, beating, finish, process, servers, stage

ECHO = "bench.echo"


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


async def in_process(database: Databases, seconds: float) -> Table:
    log = await PostgresLog.open(await database.fresh())
    desk = Desk(log, await stage(log), 1, decide)
    running = asyncio.create_task(desk.run())
    bare = await asyncpg.connect(await database.bare())
    table = Table("reserve in process (decide, append, commit)")
    disk = table.timed("fdatasync of 8 KiB", await asyncio.to_thread(synced, database.directory, seconds / 2))
    row = table.timed("bare single-row commit", await repeated(lambda: bare.execute("insert into bare values (1)"), seconds))
    for in_flight in (1, 8):
        cpu = time.process_time()
        took, span = await admissions(desk.submit, seconds, in_flight)
        cpu = time.process_time() - cpu
        p50 = table.timed(f"admit, {in_flight} in flight", took)
        rate = f"{len(took) / span:8.0f} admissions/s (each also finished), {cpu / len(took) * 1e6:.0f} us of CPU each"
        table.figure(f"    sustained at {in_flight}", rate)
    yardstick = (
        f"fdatasync of 8 KiB {disk:.2f} ms ({p50 / disk:.1f} x), bare single-row commit {row:.2f} ms ({p50 / row:.1f} x)"
    )
    table.row("reserve in process, 8 in flight, p50", "< 1 ms", f"{p50:.2f} ms", yardstick)
    table.show()
    desk.close()
    await running
    await bare.close()
    await log.close()
    return table


async def across_nats(database: Databases, nats: EmbeddedNats, seconds: float) -> Table:
    url = await database.fresh()
    log = await PostgresLog.open(url)
    await stage(log)
    await log.close()
    plane = database.plane(url, nats)
    bus = await Bus.connect(plane, "bench", DECIDER)
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
            p50 = table.timed(f"admit, {in_flight} in flight", took)
            table.figure(f"    sustained at {in_flight}", f"{len(took) / span:8.0f} admissions/s (each also finished)")
            if in_flight == 1:
                yardstick = f"bare NATS round trip + single-row commit {echoed:.2f} ms"
                measured = f"{p50 / echoed:.1f} x ({p50:.2f} ms)"
                table.row("reserve across NATS, 1 in flight, p50", "<= 3 x", measured, yardstick)
    table.show()
    beats.cancel()
    await bus.close()
    return table


async def ready(bus: Bus) -> None:
    while True:
        try:
            await bus.nc.request(ECHO, b"x", timeout=1)
            return
        except Exception:
            await asyncio.sleep(0.02)


async def measure(seconds: float = 5, directory: Path = Path("/var/tmp")) -> list[Table]:
    async with servers(directory) as (database, nats):
        return [await in_process(database, seconds), await across_nats(database, nats, seconds)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="length of each measurement")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="where the disk to measure is")
    given = parser.parse_args()
    asyncio.run(measure(given.seconds, given.directory))
