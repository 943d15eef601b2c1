"""Real servers for tests: one Postgres and one NATS a session, a database from a template and an empty stream a test."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from compose.embedded.nats import EmbeddedNats
from compose.embedded.postgres import OWNER, EmbeddedPostgres
from controlplane.bus import Bus
from controlplane.log.postgres import PostgresLog
from controlplane.parties import DECIDER
from controlplane.plane import Plane
from controlplane.subjects import STREAM
from migrations import upgrade
from tests import leftovers

TEMPLATE = "template_log"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """A short path right under /tmp: other accounts must reach it, and a socket's path has 107 bytes at most."""
    path = leftovers.directory(0o711)
    yield path
    leftovers.remove(path)


@pytest.fixture(scope="session")
def postgres_server(server_directory: Path) -> Iterator[EmbeddedPostgres]:
    """A server whose template database holds the migrated, empty schema."""
    server = EmbeddedPostgres(server_directory / "p", home=server_directory / "pg", durable=False)

    async def start() -> None:
        await server.start()
        admin = await asyncpg.connect(server.url_of("postgres", OWNER))
        await admin.execute(f"create database {TEMPLATE}")
        await upgrade(server.url_of(TEMPLATE, OWNER))
        await admin.close()

    asyncio.run(start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def nats_server(server_directory: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(server_directory / "nats")
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture
async def database(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    """URL of a fresh, migrated database, as the plane's role."""
    name = f"log_{os.getpid()}_{next(_numbers)}"
    admin = await asyncpg.connect(postgres_server.url_of("postgres", OWNER))
    await admin.execute(f"create database {name} template {TEMPLATE} strategy file_copy")
    try:
        yield postgres_server.url_of(name)
    finally:
        await admin.execute(f"drop database {name} with (force)")
        await admin.close()


@pytest.fixture
def owner_database(database: str) -> str:
    """URL of the same database, as the owner of its tables."""
    return database.replace("enginehouse@", f"{OWNER}@")


@pytest.fixture
async def log(database: str) -> AsyncIterator[PostgresLog]:
    opened = await PostgresLog.open(database)
    yield opened
    await opened.close()


@pytest.fixture
async def plane(tmp_path: Path, database: str, nats_server: EmbeddedNats) -> AsyncIterator[Plane]:
    """A plane's file over the session's servers: a fresh database, and no stream."""
    written = Plane(
        data=str(tmp_path),
        postgres_url=database,
        nats_url=nats_server.url,
        nats_token=nats_server.token,
        node_token="t",
        cookie_key="k",
    )
    written.write()
    yield written
    bus = await Bus.connect(written, "sweeper", DECIDER)
    with contextlib.suppress(Exception):
        await bus.js.delete_stream(STREAM)
    await bus.close()


@pytest.fixture
async def bus(plane: Plane) -> AsyncIterator[Bus]:
    connected = await Bus.connect(plane, "test", DECIDER)
    yield connected
    await connected.close()


async def freeze(pid: int) -> None:
    """SIGSTOP, and wait for it: while the first thread has not had its turn the others go on, and answer."""
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(30):
        while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
            await asyncio.sleep(0.005)


def _state(task: Path) -> str:
    return (task / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
