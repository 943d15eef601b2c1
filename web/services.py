"""What the web process is made of; routes find it as `app.state.services`."""

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog

from controlplane import parties
from controlplane.asker import Asker
from controlplane.bus import Bus
from controlplane.past import Past
from controlplane.plane import Plane
from controlplane.queries import History
from web.frontend import Frontends
from web.gateway import Gateway
from web.health import Health
from web.keyring import Keyring
from web.nodes import Nodes
from web.operator import Operator
from web.pages import Site, Stage
from web.plane_view import PlaneView
from web.sessions import Sessions

_log = structlog.get_logger(__name__)

WARM_AFTER_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Services:
    """`view` is the newest known state; `operator` sends operators' commands; `gateway` holds callers' requests."""

    plane: Plane
    bus: Bus
    view: PlaneView
    frontends: Frontends
    gateway: Gateway
    operator: Operator
    keyring: Keyring
    sessions: Sessions
    health: Health
    history: History
    stage: Stage
    _stops: set[Callable[[], None]] = field(default_factory=set)

    @property
    def past(self) -> Past:
        return self.stage.past

    @property
    def stopping(self) -> bool:
        return self.gateway.stopping

    @contextmanager
    def told_to_stop(self, call: Callable[[], None]) -> Iterator[None]:
        """Have `call` called when the process is about to stop: streams end before the server waits for them."""
        self._stops.add(call)
        try:
            yield
        finally:
            self._stops.discard(call)

    async def stop_streams(self) -> None:
        """End every stream, callers' and pages', and the requests behind them."""
        self.gateway.stopping = True
        self.stage.close()
        for call in tuple(self._stops):
            call()
        await self.gateway.close()

    @property
    def data(self) -> Path:
        return Path(self.plane.data)

    @staticmethod
    def make(plane: Plane) -> "Services":
        """Everything, not connected to anything yet."""
        bus = Bus(Asker(), "web", parties.WEB)
        view = PlaneView(bus)
        frontends = Frontends(plane.node_token)
        gateway = Gateway(bus, view, frontends)
        history = History(plane.postgres_url)
        secrets = Path(plane.data) / "secrets"
        token = shlex.quote(str(secrets / "admin-token"))
        site = Site(url=plane.web_url, token=f"$(cat {token})")
        return Services(
            plane=plane, bus=bus, view=view, frontends=frontends, gateway=gateway, operator=Operator(bus),
            keyring=Keyring(plane.postgres_url),
            sessions=Sessions(plane.cookie_key, plane.web_port, secrets / "sessions-left"), health=Health(bus, view, gateway),
            history=history, stage=Stage(view, history, bus, Nodes(bus), site),
        )  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Connect and follow in the background, for as long as it takes; on the way out close in order.

        Gives the task that does so. It ends by itself only when it has failed: then this process is of no use any more.
        """
        async with self.frontends:
            work = asyncio.create_task(self._run())
            try:
                yield work
            finally:
                await self.stop_streams()
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await self.keyring.close()
                await self.history.close()
                await self.bus.close()

    async def _warm(self) -> None:
        """Once it is ready, and others start no more: what the first caller and the first page would otherwise wait for."""
        await self.gateway.opened.wait()
        await asyncio.sleep(WARM_AFTER_S)
        await asyncio.to_thread(self.frontends.warm)
        await asyncio.to_thread(self.stage.templates.warm)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.stage.run())
                await self.bus.open(self.plane, deadline_s=None)
                group.create_task(self.view.run())
                group.create_task(self.gateway.run())
                group.create_task(self._warm())
                await self.bus.closed.wait()
                raise ConnectionError("the connection to NATS was closed for good")
        except Exception:
            _log.exception("web_stopped_following")
            raise
