"""The stage: everything the pages of one web process share. The app makes one, runs it, and closes it when it stops."""

import asyncio
import time
from typing import Protocol

import structlog

from controlplane import ids
from controlplane.answer import Answer
from controlplane.commands import AnyCommand, Checkpoint, Load, Move, Order, Retry, Save, Sleep, Stop
from controlplane.past import Past
from controlplane.refusal import Code, Refused
from controlplane.subjects import COMMAND_OPERATOR, ImageAsk, ImageDone
from web.live.hub import Hub
from web.live.painter import Painter
from web.live.sight import Sight
from web.pages.history import History, newest
from web.pages.templates import Site, Templates

_log = structlog.get_logger(__name__)

VERBS: dict[str, type[Load | Sleep | Checkpoint | Save | Stop | Retry]] = {
    "load": Load, "sleep": Sleep, "checkpoint": Checkpoint, "save": Save, "stop": Stop, "retry": Retry,
}  # fmt: skip


class Commands(Protocol):
    """Sends a command and returns its answer. Raises Refused."""

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer: ...


class Nodes(Protocol):
    """Asks a node what only it can see. Raises Refused."""

    async def ask(self, node: str, ask: ImageAsk) -> ImageDone: ...


class Stage:
    """Attributes: sight, history, past, nodes, templates, hub, painter. Made in the event loop that serves the pages."""

    def __init__(self, sight: Sight, history: History, commands: Commands, nodes: Nodes, site: Site) -> None:
        self.sight, self.history, self.nodes, self.site = sight, history, nodes, site
        self.past = Past(history)
        self.templates = Templates(site)
        self.hub = Hub()
        self.painter = Painter(sight, self.hub, self.templates.draw)
        self.painter.resynced = self._refill_soon
        self._commands = commands
        self._refilling: asyncio.Task[None] | None = None
        self._stale = asyncio.Event()

    async def run(self) -> None:
        """Paint and beat until cancelled. Never fails for want of the log: what is recent fills in once it answers."""
        self._refill_soon()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.painter.run())
            group.create_task(self.hub.run())

    def close(self) -> None:
        """End every stream at once; call it before the server waits for its connections."""
        self.hub.close()
        if self._refilling is not None:
            self._refilling.cancel()

    async def operate(self, verb: str, model: str, actor: str) -> Answer:
        """Send an operator's command about a model. Raises Refused."""
        body: AnyCommand
        if verb.startswith("move:"):
            body = Move(what=model, device=verb.removeprefix("move:"))
        elif (kind := VERBS.get(verb)) is not None:
            body = kind(model=model)
        else:
            raise Refused(Code.INVALID, f"there is no operation {verb!r}; there are {', '.join(VERBS)}, move:DEVICE")
        return await self.send(body, actor)

    async def send(self, body: AnyCommand, actor: str) -> Answer:
        """Send an operator's command. Raises Refused."""
        return await self._commands.command(COMMAND_OPERATOR, Order(id=ids.new(ids.COMMAND), actor=actor, body=body))

    def _refill_soon(self) -> None:
        """Read the newest of the log again; asked for during a reading, once more after it."""
        self._stale.set()
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.ensure_future(self._refill())

    async def _refill(self) -> None:
        """So that the lists are not empty after a start, and have no hole after a gap."""
        attempt = 0
        while self._stale.is_set():
            self._stale.clear()
            try:
                self.painter.recent.refill(await newest(self.history, before=None))
            except Exception as error:
                away = isinstance(error, Refused | OSError | TimeoutError)
                _log.warning("live.history_away", reason=repr(error), attempt=attempt, exc_info=None if away else error)
                self._stale.set()
                await asyncio.sleep(min(2 ** min(attempt, 6) * 0.25, 10))
                attempt += 1
            else:
                self.painter.noticed(None)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
