"""Logins of the bus: each party says what is its to say, and the server refuses it the rest."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from compose.embedded.nats import EmbeddedNats
from controlplane import subjects
from controlplane.asker import Asker
from controlplane.bus import Bus
from controlplane.envelope import to_wire
from controlplane.events import NodeFellSilent
from controlplane.follower import follow
from controlplane.parties import DECIDER, OPERATOR, READER, WEB, inbox, node, rights
from controlplane.plane import Login, Plane
from controlplane.refusal import Refused
from tests.chronicle import Chronicle

PARTIES = (DECIDER, WEB, OPERATOR, READER, node("n1"), node("n2"))


@pytest.fixture(name="plane")
async def _plane(tmp_path: Path) -> AsyncIterator[Plane]:
    logins = {party: Login(user=party, password=f"secret of {party}") for party in PARTIES}
    async with EmbeddedNats(tmp_path / "nats", logins=logins) as server:
        assert (tmp_path / "nats" / "nats.conf").stat().st_mode & 0o777 == 0o600
        yield Plane(data=str(tmp_path), postgres_url="", nats_url=server.url, nats_logins=logins)


class Listener:
    """Hears everything that is published, as the decider may."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    async def hear(self, message: Msg) -> None:
        self.heard.append(message.subject)


@contextlib.asynccontextmanager
async def connected(plane: Plane, party: str) -> AsyncIterator[tuple[Client, list[str]]]:
    """A bare client of `party`, and the server's complaints about it."""
    complaints: list[str] = []

    async def complain(error: Exception) -> None:
        complaints.append(str(error).lower())

    login = plane.nats_logins[party]
    client = Asker()
    await client.connect(
        plane.nats_url, user=login.user, password=login.password, error_cb=complain, inbox_prefix=inbox(party).encode()
    )
    try:
        yield client, complaints
    finally:
        await client.close()


ALLOWED = [
    (WEB, subjects.COMMAND_GATEWAY), (WEB, subjects.COMMAND_OPERATOR), (WEB, subjects.beat_gateway("gw_1")),
    (WEB, subjects.measure("n1")), (OPERATOR, subjects.COMMAND_OPERATOR), (node("n1"), subjects.command_node("n1")),
    (node("n1"), subjects.beat_node("n1")),
]  # fmt: skip
FORBIDDEN = [
    (node("n1"), subjects.command_node("n2")), (node("n1"), subjects.beat_node("n2")),
    (node("n1"), subjects.COMMAND_OPERATOR), (node("n1"), subjects.COMMAND_GATEWAY),
    (node("n1"), "events.n1.instance.InstanceUp"), (node("n1"), f"$JS.API.STREAM.DELETE.{subjects.STREAM}"),
    (node("n1"), subjects.images_of("n2")), (WEB, subjects.command_node("n1")), (WEB, subjects.beat_node("n1")),
    (WEB, "events._.model.ModelRetired"), (OPERATOR, subjects.COMMAND_GATEWAY), (READER, subjects.COMMAND_OPERATOR),
]  # fmt: skip


async def test_each_may_publish_what_is_its_own_and_nothing_else(plane: Plane) -> None:
    async with connected(plane, DECIDER) as (decider, _):
        listener = Listener()
        await decider.subscribe(">", cb=listener.hear)
        await decider.flush()
        for party, subject in ALLOWED:
            async with connected(plane, party) as (client, complaints):
                await client.publish(subject, b"{}")
                await client.flush()
                assert complaints == []
        for party, subject in FORBIDDEN:
            async with connected(plane, party) as (client, complaints):
                await client.publish(subject, b"{}")
                await client.flush()
                async with asyncio.timeout(60):
                    while not complaints:
                        await asyncio.sleep(0.01)
                assert "permissions violation" in complaints[0] and subject.lower() in complaints[0], (party, subject)
        await decider.flush()
        own = [subject for subject in listener.heard if not subject.startswith(("$", "_"))]
        assert own == [subject for _, subject in ALLOWED]


@pytest.mark.parametrize(("party", "subject"), [(node("n1"), "_INBOX_web.>"), (node("n1"), "cmd.>"), (WEB, "node.n1.>")])
async def test_none_hears_what_is_meant_for_another(plane: Plane, party: str, subject: str) -> None:
    async with connected(plane, party) as (client, complaints):
        await client.subscribe(subject)
        await client.flush()
        async with asyncio.timeout(60):
            while not complaints:
                await asyncio.sleep(0.01)
        assert "subscription" in complaints[0]


async def test_a_wrong_password_is_refused(plane: Plane) -> None:
    forged = Plane(data="", postgres_url="", nats_url=plane.nats_url, nats_logins={WEB: Login(user="web", password="guess")})
    with pytest.raises(Refused):
        await Bus.connect(forged, "web", WEB, deadline_s=2)


@pytest.mark.parametrize("deadline_s", [2, 30])
async def test_who_gives_up_connecting_leaves_no_connection(deadline_s: float) -> None:
    """A server that takes connections and says nothing."""
    left: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left.put_nowait(await reader.read())
        writer.close()

    async with await asyncio.start_server(listen, "127.0.0.1", 0) as server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        connecting = asyncio.create_task(
            Bus.connect(Plane(data="", postgres_url="", nats_url=url), "web", WEB, deadline_s=deadline_s)
        )
        async with asyncio.timeout(60):
            assert await left.get() == b"", "it has seen that somebody listens"
        if deadline_s > 2:
            connecting.cancel()
        await asyncio.wait([connecting], timeout=60)
        assert connecting.cancelled() or isinstance(connecting.exception(), Refused)
        async with asyncio.timeout(60):
            assert await left.get() == b""


@pytest.mark.parametrize("party", [WEB, READER, OPERATOR, node("n1")])
async def test_every_party_follows_events_and_nodes_answer(plane: Plane, party: str) -> None:
    decider = await Bus.connect(plane, "decider", DECIDER)
    await decider.js.add_stream(name=subjects.STREAM, subjects=[subjects.EVENTS])
    [event] = Chronicle().record(NodeFellSilent(node="n1"))
    await decider.js.publish(subjects.event(event), to_wire(event))
    bus = await Bus.connect(plane, "test", party)
    async with asyncio.timeout(60):
        async with contextlib.aclosing(follow(bus, after=0)) as events:
            assert await anext(events) == event
        if party.startswith("node."):

            async def count(message: Msg) -> None:
                await message.respond(b"7")

            await bus.nc.subscribe(subjects.measure("n1"), cb=count)
            await bus.nc.flush()
            web = await Bus.connect(plane, "web", WEB)
            assert (await web.nc.request(subjects.measure("n1"), b"?")).data == b"7"
            await web.close()
    await bus.close()
    await decider.close()


@pytest.mark.parametrize("party", ["", "node", "node.", "node.a.b", "node.*", "node.>", "anybody", "web.x"])
def test_what_is_no_party_has_no_rights(party: str) -> None:
    with pytest.raises(ValueError, match="no party"):
        rights(party)
