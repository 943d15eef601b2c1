"""The two servers of a plane: embedded ones, supervised; or given ones, whose versions are checked."""

import asyncio
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from compose.directory import Directory
from compose.embedded import nats, postgres
from compose.embedded.nats import EmbeddedNats
from compose.embedded.postgres import EmbeddedPostgres
from compose.refusal import EnvironmentRefusal
from compose.supervisor import Supervisor
from controlplane.parties import DECIDER, OPERATOR, READER, WEB, node
from controlplane.plane import ANYBODY, NODE, Login

NATS_PORT: Final = 4222


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    postgres_url: str
    owner_url: str
    """For migrations."""
    nats_url: str
    embedded: bool
    nats_token: str | None = None
    nats_logins: dict[str, Login] = {}


class Embedded:
    """The embedded servers, in a supervisor's charge. Where they will be is known before they are started."""

    def __init__(self, supervisor: Supervisor, directory: Directory) -> None:
        """Raises ServerRefusal."""
        logs, logins = directory.path / "logs", _logins(directory)
        database = EmbeddedPostgres(directory.path, log=logs / "postgres.log")
        bus = EmbeddedNats(directory.path / "nats", logins=logins, log=logs / "nats.log")
        bus.keep_port()
        self._children = supervisor.serve("postgres", database), supervisor.serve("nats", bus)
        self.servers = Servers(
            postgres_url=database.url, owner_url=database.owner_url, nats_url=bus.url, nats_logins=logins, embedded=True
        )

    async def start(self) -> None:
        """Start both at the same time, and return once both answer. Raises ServerRefusal."""
        starts = [asyncio.create_task(child.start()) for child in self._children]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await asyncio.gather(*starts, return_exceptions=True)  # so that nothing is started behind the back of our end
            raise


def _logins(directory: Directory) -> dict[str, Login]:
    """One for each party, its password kept in the data directory."""
    parties = (DECIDER, WEB, OPERATOR, READER, node(NODE))
    return {party: Login(user=party, password=directory.secret(f"nats-{party}")) for party in parties}


async def given(postgres_url: str, nats_url: str) -> Servers:
    """Check servers given by URL. Its user and password, or its user alone as a token, are everybody's.

    Raises EnvironmentRefusal or ServerRefusal.
    """
    parts = urlsplit(nats_url)
    if parts.scheme != "nats" or not parts.hostname:
        raise EnvironmentRefusal(
            "nats_url", f"{nats_url!r} is not a NATS URL.", "Write nats://[TOKEN@]HOST:PORT or nats://USER:PASSWORD@HOST:PORT."
        )
    bare = urlunsplit(("nats", f"{parts.hostname}:{parts.port or NATS_PORT}", "", "", ""))
    try:
        await nats.check(bare)
    except ConnectionError as error:
        raise EnvironmentRefusal(
            "nats_away", f"Nothing listens at {bare}: {error}.", "Start NATS there, or give no URL."
        ) from error
    await postgres.check(postgres_url)
    user, password = unquote(parts.username or "") or None, parts.password
    logins = {ANYBODY: Login(user=user, password=unquote(password))} if user and password is not None else {}
    return Servers(
        postgres_url=postgres_url, owner_url=postgres_url, nats_url=bare, nats_token=None if logins else user,
        nats_logins=logins, embedded=False,
    )  # fmt: skip
