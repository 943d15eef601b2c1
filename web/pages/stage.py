"""The stage: everything the pages of one web process share. The app makes one, runs it, and closes it when it stops."""

import asyncio
import time
from typing import Protocol

import structlog

from controlplane import ids
from controlplane.answer import Answer
from controlplane.commands import AnyCommand, Load, Order, Retry, Sleep, Stop
from controlplane.refusal import Code, Refused
from controlplane.subjects import COMMAND_OPERATOR
from web.live.hub import Hub
from web.live.painter import Painter
from web.live.sight import Sight
from web.pages.history import History
from web.pages.templates import Site, Templates
from web.views.recent import ENDED_KEPT, OTHERS_KEPT

_log = structlog.get_logger(__name__)

VERBS: dict[str, type[Load | Sleep | Stop | Retry]] = {"load": Load, "sleep": Sleep, "stop": Stop, "retry": Retry}


class Commands(Protocol):
    """Sends a command and returns its answer. Raises Refused."""

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer: ...


class Stage:
    """Attributes: sight, history, templates, hub, painter. Made in the event loop that serves the pages."""

    def __init__(self, sight: Sight, history: History, commands: Commands, site: Site) -> None:
        self.sight, self.history, self.site = sight, history, site
        self.templates = Templates(site)
        self.hub = Hub()
        self.painter = Painter(sight, self.hub, self.templates.draw)
        self.painter.resynced = self._refill_soon
        self._commands = commands
        self._refilling: asyncio.Task[None] | None = None

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
        kind = VERBS.get(verb)
        if kind is None:
            raise Refused(Code.INVALID, f"there is no operation {verb!r}; there are {', '.join(VERBS)}")
        body: AnyCommand = kind(model=model)
        return await self._commands.command(COMMAND_OPERATOR, Order(id=ids.new(ids.COMMAND), actor=actor, body=body))

    def _refill_soon(self) -> None:
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.ensure_future(self._refill())

    async def _refill(self) -> None:
        """Read the newest of the log, so that the lists are not empty after a start or a gap."""
        for attempt in range(8):
            try:
                ended = await self.history.page_of_ended(before=None, limit=ENDED_KEPT)
                newest = await self.history.page_of_events(before=None, limit=OTHERS_KEPT)
            except (Refused, OSError, TimeoutError) as error:
                _log.warning("live.history_away", reason=str(error), attempt=attempt)
                await asyncio.sleep(min(2**attempt * 0.25, 10))
                continue
            self.painter.recent.refill([*ended, *newest])
            self.painter.noticed(None)
            return


def now_ms() -> int:
    return time.time_ns() // 1_000_000
