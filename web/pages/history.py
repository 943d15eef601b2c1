"""What the pages read from the log: newest first, by pages, each by an index."""

from collections.abc import Sequence
from typing import Protocol

from controlplane.envelope import Recorded


class History(Protocol):
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
