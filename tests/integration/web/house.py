"""A web process (in the test's own loop) over real Postgres, NATS and decider, with a node and frontends by script."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import msgspec
import openai

from controlplane import ids
from controlplane.bus import Bus
from controlplane.commands import Order, RegisterModel
from controlplane.envelope import Recorded
from controlplane.log.postgres import COLUMNS, recorded
from controlplane.parties import DECIDER
from controlplane.plane import Plane
from controlplane.spec import ModelSpec
from controlplane.subjects import COMMAND_OPERATOR
from tests import deciders
from tests.integration.web.scripted_frontend import TOKEN
from tests.integration.web.scripted_node import ScriptedNode
from web.server import serve
from web.services import Services
from web.tokens import new_token

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 40.0
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody, and is not asked to: each client would read all of the machine's certificates, for plain HTTP."""
STOP_S = 15.0
"""Of a web process that is told to end. `up` waits 5 s for it; here it has less than a core for itself."""


async def until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Wait until `condition` is true (awaiting it, if it asks for that); return its value."""
    end = asyncio.get_running_loop().time() + deadline_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert asyncio.get_running_loop().time() < end, f"not so within {deadline_s} s: {condition}"
        await asyncio.sleep(0.01)


class House:
    """Attributes: plane, services, url, token, node, bus, client (HTTP with the token), ai (openai client)."""

    plane: Plane
    services: Services
    url: str
    token: str
    node: ScriptedNode
    bus: Bus
    client: httpx.AsyncClient
    ai: openai.AsyncOpenAI
    decider: deciders.Decider

    def start_decider(self) -> None:
        self.decider = deciders.start(self.plane.data, Path(self.plane.data) / "decider.log")

    async def kill_decider(self) -> None:
        self.decider.kill()
        await self.decider.wait()

    async def register(self, *names: str, **fields: Any) -> None:
        for name in names:
            spec = ModelSpec(name=name, source=f"fake:{name}", engine="fake", **fields)
            order = Order(id=ids.new(ids.COMMAND), actor="operator:test", body=RegisterModel(spec=spec))
            await self.bus.command(COMMAND_OPERATOR, order)

        def inspected() -> bool:
            models = self.services.view.fleet.models
            return all(name in models and models[name].facts is not None for name in names)

        await until(inspected)

    async def events(self, *types: str) -> list[Recorded]:
        """The log, or its events of these types."""
        connection = await asyncpg.connect(self.plane.postgres_url)
        try:
            rows = await connection.fetch(f"select {COLUMNS} from event order by position")
        finally:
            await connection.close()
        return [event for event in map(recorded, rows) if not types or event.type in types]

    async def endings(self) -> dict[str, list[str]]:
        """Each accepted request's ends, by type."""
        ends: dict[str, list[str]] = {}
        for event in await self.events():
            if event.type == "RequestAccepted":
                ends[event.event.request] = []  # type: ignore[union-attr]
            if event.type in ("RequestFinished", "RequestFailed", "RequestCancelled"):
                ends[event.event.request].append(event.type)  # type: ignore[union-attr]
        return ends

    async def ended_once(self) -> None:
        """Wait until every accepted request has ended (the view may be behind the log), and check that each did once."""

        async def done() -> bool:
            return all((await self.endings()).values())

        await until(done)
        ends = await self.endings()
        assert all(len(each) == 1 for each in ends.values()), ends

    async def settled(self, *expected: str) -> None:
        """Wait until every accepted request has ended, and check that each did once, as `expected` (in any order)."""

        async def done() -> bool:
            ends = await self.endings()
            return len(ends) >= len(expected) and all(ends.values())

        await until(done)
        await asyncio.sleep(0.1)  # time for an end too many
        ends = await self.endings()
        assert all(len(each) == 1 for each in ends.values()), ends
        assert sorted(each[0] for each in ends.values()) == sorted(expected), ends

    async def chat(self, model: str = "alpha", **fields: Any) -> Any:
        return await self.ai.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}], **fields)


@asynccontextmanager
async def opened(plane: Plane, *, devices: int = 1) -> AsyncIterator[House]:
    """A house whose plane is ready; the decider and web are ended with it."""
    house = House()
    house.plane = msgspec.structs.replace(plane, node_token=TOKEN)
    house.plane.write()
    house.token = await new_token(plane.postgres_url, "test")
    house.start_decider()
    house.bus = await Bus.connect(house.plane, "house", DECIDER)
    house.node = ScriptedNode(house.bus, devices)
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    web = asyncio.create_task(serve(house.plane, stop, lambda services, port: started.set_result((services, port))))
    try:
        done, _ = await asyncio.wait({web, started}, return_when=asyncio.FIRST_COMPLETED)
        if web in done:
            web.result()
        house.services, port = await started
        house.url = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {house.token}"}
        async with httpx.AsyncClient(base_url=house.url, headers=headers, timeout=DEADLINE_S, verify=NO_TLS) as house.client:
            house.ai = openai.AsyncOpenAI(
                base_url=f"{house.url}/v1", api_key=house.token, max_retries=0, timeout=DEADLINE_S,
                http_client=openai.DefaultAsyncHttpxClient(verify=NO_TLS),
            )  # fmt: skip
            await until(lambda: _ready(house))
            await house.node.start()
            yield house
            await house.ai.close()
    finally:
        begun = asyncio.get_running_loop().time()
        stop.set()
        await web
        assert asyncio.get_running_loop().time() - begun < STOP_S, "web took too long to stop"
        await house.node.stop()
        await house.bus.close()
        with contextlib.suppress(ProcessLookupError):
            house.decider.terminate()
        await house.decider.wait()


async def _ready(house: House) -> bool:
    return (await house.client.get("/readyz")).status_code == 200
