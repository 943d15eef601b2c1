"""What the benches of the log share: servers of their own on a real disk, with fsync on, and the story of a plane."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from compose.embedded.nats import EmbeddedNats
from compose.embedded.postgres import OWNER, EmbeddedPostgres
from controlplane import ids, subjects
from controlplane.bus import Bus
from controlplane.commands import Admit, End, EndRequests, Order
from controlplane.fleet import Fleet
from controlplane.log.postgres import PostgresLog
from controlplane.plane import Plane
from controlplane.refusal import Refused
from migrations import upgrade
from tests.unit.decisions.spec import plane as story_of_a_plane
from tests.unit.decisions.spec import spec, with_models

MODEL, GATEWAY, NODE = "m", "gw_1", "n1"


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


@asynccontextmanager
async def servers(directory: Path) -> AsyncIterator[tuple[Databases, EmbeddedNats]]:
    """Postgres and NATS in a fresh directory below `directory`, which says what disk is measured."""
    place = Path(tempfile.mkdtemp(prefix="eh-bench-", dir=directory))
    place.chmod(0o711)
    try:
        async with EmbeddedPostgres(place / "p", home=place / "pg") as postgres, EmbeddedNats(place / "nats") as nats:
            yield Databases(place, postgres), nats
    finally:
        shutil.rmtree(place, ignore_errors=True)
