"""kill -9 of Postgres, NATS and the decider while commands are in flight: what was acknowledged is in the log, once."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from compose.embedded.nats import EmbeddedNats
from compose.embedded.postgres import EmbeddedPostgres
from controlplane import ids, subjects
from controlplane.audit import audit
from controlplane.bus import Bus
from controlplane.commands import OpenGateway, Order
from controlplane.follower import follow
from controlplane.log.postgres import PostgresLog
from controlplane.parties import DECIDER
from controlplane.plane import Plane
from controlplane.refusal import Code, Refused
from migrations import upgrade
from tests import leftovers

CALLERS = 8
ENOUGH = 60
"""Commands acknowledged before a fault, and again after it."""
LIMIT_S = 90.0


class Ward:
    """Servers and a decider that is started again whenever it ends, as `up` does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.postgres = EmbeddedPostgres(directory / "p", home=directory / "pg", durable=False)
        self.nats = EmbeddedNats(directory / "nats")
        self.decider: asyncio.subprocess.Process | None = None
        self.statuses = list[int]()
        self.acknowledged = dict[str, tuple[str, int]]()
        """Command id -> (gateway, position answered)."""

    async def open(self) -> Plane:
        await asyncio.gather(self.postgres.start(), self.nats.start())
        await upgrade(self.postgres.owner_url)
        plane = Plane(
            data=str(self.directory), postgres_url=self.postgres.url, nats_url=self.nats.url, nats_token=self.nats.token
        )
        plane.write()
        return plane

    async def keep_deciding(self) -> None:
        log = (self.directory / "decider.log").open("ab")
        while True:
            self.decider = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "controlplane.decider", "--data", str(self.directory), stderr=log
            )
            try:
                self.statuses.append(await self.decider.wait())
            except asyncio.CancelledError:
                self.decider.terminate()
                await self.decider.wait()
                log.close()
                raise

    async def call(self, bus: Bus, caller: int) -> None:
        """Send commands, each again with its id until it is answered."""
        number = 0
        while True:
            number += 1
            gateway = f"gw_{caller}_{number}"
            body = OpenGateway(gateway=gateway, host=gateway, pid=1)
            order = Order(id=ids.new(ids.COMMAND), actor=f"gateway:{gateway}", body=body)
            while order.id not in self.acknowledged:
                try:
                    reply = await bus.command(subjects.COMMAND_GATEWAY, order, timeout_s=1)
                except Refused as refused:
                    if refused.code is not Code.UNAVAILABLE:
                        raise
                    await asyncio.sleep(0.02)
                else:
                    self.acknowledged[order.id] = gateway, reply.position

    async def more(self, count: int) -> None:
        """Wait for so many more acknowledgements."""
        wanted = len(self.acknowledged) + count
        async with asyncio.timeout(LIMIT_S):
            while len(self.acknowledged) < wanted:
                await asyncio.sleep(0.01)

    # ---- faults ----

    async def kill_decider(self) -> None:
        assert self.decider is not None
        self.decider.kill()

    async def kill_postgres(self) -> None:
        assert self.postgres.process is not None
        self.postgres.process.popen.kill()
        await self.postgres.exited()
        await self.postgres.start()

    async def kill_nats(self) -> None:
        assert self.nats.process is not None
        self.nats.process.popen.kill()
        await self.nats.exited()
        await self.nats.start()

    async def lose_the_stream(self) -> None:
        """NATS dies, and its store with it."""
        assert self.nats.process is not None
        self.nats.process.popen.kill()
        await self.nats.exited()
        shutil.rmtree(self.nats.directory / "store")
        await self.nats.start()


@pytest.fixture
async def ward() -> AsyncIterator[Ward]:
    directory = leftovers.directory(0o711)
    made = Ward(directory)
    try:
        yield made
    finally:
        await asyncio.gather(made.postgres.stop(), made.nats.stop())
        leftovers.remove(directory)


FAULTS: dict[str, Callable[[Ward], Awaitable[None]]] = {
    "decider": Ward.kill_decider, "postgres": Ward.kill_postgres, "nats": Ward.kill_nats, "stream": Ward.lose_the_stream,
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_was_acknowledged_survives(ward: Ward, fault: str) -> None:
    plane = await ward.open()
    bus = await Bus.connect(plane, "chaos", DECIDER)
    seen = list[int]()

    async def watch() -> None:
        async for event in follow(bus, after=0):
            seen.append(event.position)

    deciding, watching = asyncio.create_task(ward.keep_deciding()), asyncio.create_task(watch())
    callers = [asyncio.create_task(ward.call(bus, caller)) for caller in range(CALLERS)]
    try:
        for _ in range(2):
            await ward.more(ENOUGH)
            await FAULTS[fault](ward)
        await ward.more(ENOUGH)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await proven(ward, plane, bus, seen)
        if fault in {"nats", "stream"}:
            assert ward.statuses == [], "the decider outlives the bus"
    finally:
        for task in (watching, *callers):
            task.cancel()
        deciding.cancel()
        await asyncio.gather(deciding, watching, *callers, return_exceptions=True)
        await bus.close()


async def proven(ward: Ward, plane: Plane, bus: Bus, seen: list[int]) -> None:
    """Lost 0, doubled 0; table, stream, followers and live state agree."""
    log = await PostgresLog.open(plane.postgres_url)
    written = await log.of_commands(list(ward.acknowledged))
    for command, (gateway, position) in ward.acknowledged.items():
        events = written.get(command, [])
        assert [event.stream for event in events] == [f"gateway:{gateway}"], f"{command} was acknowledged"
        assert events[-1].position == position, "answered with its own position"
    head = await log.head()
    opened = [event.stream for event in await log.read(0, head) if event.type == "GatewayOpened"]
    assert len(set(opened)) == len(opened), "carried out once"
    report = await audit(log, bus)
    assert report.findings == ()
    async with asyncio.timeout(LIMIT_S):
        while not seen or seen[-1] < head:
            await asyncio.sleep(0.01)
    assert seen == list(range(1, len(seen) + 1)), "a follower through it all saw each event once, in order"
    await log.close()
