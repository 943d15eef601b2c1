"""The pages of a staged plane behind a real server: for browsers, measurements, and a look by hand.

By hand: `python -m tests.stagehouse --port 8090`.
"""

import argparse
import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator

import uvicorn
from litestar import Litestar, get, post
from litestar.datastructures import State
from litestar.response import Redirect
from litestar.types import Message, Receive, Scope, Send

from tests.busyplane import busy, measured
from tests.staged import MIB, StagedPlane
from web.auth import SECURITY
from web.pages import History, Site, Stage, router, static


@get("/login", include_in_schema=False)
async def login() -> str:
    return "signed out"


@post("/logout", include_in_schema=False)
async def logout() -> Redirect:
    return Redirect("/login", status_code=303)


class Stagehouse:
    """Attributes: plane, stage, app, url."""

    def __init__(self, plane: StagedPlane, port: int = 0, history: History | None = None) -> None:
        self.plane, self._history = plane, history or plane
        self.socket = socket.socket(proto=socket.IPPROTO_TCP)  # named, or asyncio leaves delays of 40 ms on
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.stage = Stage(plane, self._history, plane, plane, Site(self.url))
        self._app = Litestar([router, static, login, logout], state=State({"stage": self.stage}), openapi_config=None)
        self._state = self._app.state
        config = uvicorn.Config(
            self._secured, interface="asgi3", log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=30
        )
        self._server = uvicorn.Server(config)

    async def _secured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The headers that the real gate adds."""

        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY]
            await send(message)

        await self._app(scope, receive, wrapped)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator["Stagehouse"]:
        """Serve until left."""
        self._serving = asyncio.create_task(self._server._serve([self.socket]))
        self._running = [asyncio.create_task(self.stage.run())]
        try:
            while not self._server.started:  # the library has no signal for it
                await asyncio.sleep(0.01)
            yield self
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Close streams first, then the server: as the web process does."""
        self.stage.close()
        self._server.should_exit = True
        await self._serving
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self.socket.close()

    def restage(self) -> Stage:
        """Go on with a new stage, as a new web process would."""
        self.stage = self._state["stage"] = Stage(self.plane, self._history, self.plane, self.plane, Site(self.url))
        self._running.append(asyncio.create_task(self.stage.run()))
        return self.stage


async def _play(plane: StagedPlane) -> None:
    """Requests come and go, a climb goes on and ends, again and again."""
    climber, open_requests = "ins_01JDXB4M9S7QKC2W5T8B", list[str]()
    for step in itertools.count():
        await asyncio.sleep(0.25)
        plane.now_ms = time.time_ns() // 1_000_000
        if step % 3 == 0:
            open_requests.append(plane.request("smollm2-135m", instance="ins_01JDXB4M9S7QKC2W5T8A"))
        if len(open_requests) > 3:
            plane.end(open_requests.pop(0))
        plane.beat(measured(plane, 30 + step % 17, min(step * 3, 258) * MIB))
        if step == 90:
            plane.up(climber, weight_set="ws_41b07c9d2e6f8a1355aa")


async def _main(port: int, scenario: str) -> None:
    plane = StagedPlane(time.time_ns() // 1_000_000)
    if scenario != "empty":
        busy(plane)
    async with Stagehouse(plane, port).open() as house:
        print(house.url, flush=True)
        await (_play(plane) if scenario == "play" else asyncio.Event().wait())


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--port", type=int, default=8090)
    arguments.add_argument("--scenario", choices=("play", "still", "empty"), default="play")
    given = arguments.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(given.port, given.scenario))
