"""What the pages read from the log: newest first, by pages, each by an index."""

from collections.abc import Sequence
from typing import Final, Protocol

from controlplane.envelope import Recorded
from controlplane.events import BY_NAME
from controlplane.past import Readable
from web.views.recent import ENDED_KEPT, OTHERS_KEPT, REQUEST_EVENTS_KEPT

OTHER_TYPES: Final = tuple(name for name, event in BY_NAME.items() if event.AGGREGATE != "request")


class History(Readable, Protocol):
    """`before`: only events at smaller positions. All of them newest first, at most `limit`."""

    async def page_of_events(
        self,
        *,
        before: int | None,
        limit: int,
        stream: str | None = None,
        type: str | None = None,
        types: Sequence[str] | None = None,
    ) -> Sequence[Recorded]:
        """`types`: any of them."""
        ...

    async def page_of_ended(
        self, *, before: int | None, limit: int, model: str | None = None, outcome: str | None = None
    ) -> Sequence[Recorded]:
        """Events that ended a request; `outcome` is finished, failed or cancelled."""
        ...

    async def page_of_operation(self, operation: str, *, before: int | None, limit: int) -> Sequence[Recorded]: ...


async def newest(history: History, before: int | None) -> list[Recorded]:
    """As many of the newest events below `before` as `Recent` keeps, of each kind."""
    ended = await history.page_of_ended(before=before, limit=ENDED_KEPT)
    requests = await history.page_of_events(before=before, limit=REQUEST_EVENTS_KEPT)
    others = await history.page_of_events(before=before, limit=OTHERS_KEPT, types=OTHER_TYPES)
    return [*ended, *requests, *others]
