"""Reading the history, for web: pages of events, each by an index, and what `Past` folds. An outage of Postgres is UNAVAILABLE.

Rows are the events themselves: the event that ends a request or an operation holds all that a row shows.
"""

from collections.abc import Sequence
from typing import Any, Final

import asyncpg

from controlplane.envelope import Recorded
from controlplane.log.contract import Snapshot
from controlplane.log.postgres import AWAY, COLUMNS, SNAPSHOT, readers, recorded
from controlplane.refusal import Code, Refused

READERS: Final = 4
ENDINGS: Final = {"finished": "RequestFinished", "failed": "RequestFailed", "cancelled": "RequestCancelled"}
_ENDED: Final = "type in ('RequestFinished', 'RequestFailed', 'RequestCancelled')"
"""As the partial indexes `event_ended` and `event_ended_of_model` say it."""


class History:
    """Raises Refused(UNAVAILABLE) while Postgres is away."""

    def __init__(self, postgres_url: str) -> None:
        self._url = postgres_url
        self._pool: asyncpg.Pool | None = None

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()

    async def events_after(
        self, after: int, *, limit: int, stream: str | None = None, type: str | None = None
    ) -> list[Recorded]:
        """Events at positions above `after`, oldest first."""
        return await self._select(_where("position > {}", after, stream=stream, type=type), "position", limit)

    async def page_of_events(
        self, *, before: int | None, limit: int, stream: str | None = None, type: str | None = None,
        types: Sequence[str] | None = None,
    ) -> list[Recorded]:  # fmt: skip
        """Newest first, at positions below `before`; `types`: any of them."""
        parts = _where("position < coalesce({}, 9223372036854775807)", before, stream=stream, type=type)
        if types is not None:
            parts.append(("type = any({})", list(types)))
        return await self._select(parts, "position desc", limit)

    async def page_of_ended(
        self, *, before: int | None, limit: int, model: str | None = None, outcome: str | None = None
    ) -> list[Recorded]:
        """Events that ended a request, newest first; `outcome` is finished, failed or cancelled."""
        parts = _where(f"{_ENDED} and position < coalesce({{}}, 9223372036854775807)", before)
        if model is not None:
            parts.append(("(data ->> 'model') = {}", model))
        if outcome is not None:
            parts.append(("type = {}", ENDINGS[outcome]))
        return await self._select(parts, "position desc", limit)

    async def page_of_operation(self, operation: str, *, before: int | None, limit: int) -> list[Recorded]:
        """All that an operation caused, newest first."""
        parts: list[tuple[str, object]] = [("operation = {}", operation)]
        parts.append(("position < coalesce({}, 9223372036854775807)", before))
        return await self._select(parts, "position desc", limit)

    async def first_of_operations(self, operations: Sequence[str]) -> dict[str, Recorded]:
        """The event with which each operation was asked for."""
        parts: list[tuple[str, object]] = [("stream = any({})", [f"operation:{name}" for name in operations])]
        found = await self._select([*parts, ("version = {}", 1)], "position", len(operations))
        return {recorded.stream.partition(":")[2]: recorded for recorded in found}

    async def of_stream(self, stream: str, limit: int = 1000) -> list[Recorded]:
        """One aggregate's events, oldest first."""
        return await self._select([("stream = {}", stream)], "version", limit)

    # ---- as `past.Readable` has it, and `log.contract.Log`

    async def head(self) -> int:
        (row,) = await self._rows("select position from head")
        return int(row[0])

    async def read(self, after: int, limit: int = 5000) -> list[Recorded]:
        return await self.events_after(after, limit=limit)

    async def first_since(self, at_ms: int) -> int:
        (row,) = await self._rows("select first_since($1)", at_ms)
        return int(row[0])

    async def snapshot(self, evolve_version: int, *, after: int = 0, up_to: int | None = None) -> Snapshot | None:
        rows = await self._rows(SNAPSHOT, evolve_version, after, up_to)
        return Snapshot(*rows[0]) if rows else None

    async def _select(self, parts: list[tuple[str, object]], order: str, limit: int) -> list[Recorded]:
        """Conditions are ours, values are bound. A text with a NUL is in no row: Postgres holds none."""
        if any(isinstance(value, str) and "\0" in value for _, value in parts):
            return []
        conditions = " and ".join(text.format(f"${nth}") for nth, (text, _) in enumerate(parts, start=1))
        query = f"select {COLUMNS} from event where {conditions} order by {order} limit ${len(parts) + 1}"  # noqa: S608
        return [recorded(row) for row in await self._rows(query, *(value for _, value in parts), limit)]

    async def _rows(self, query: str, *values: object) -> list[Any]:
        try:
            if self._pool is None:
                self._pool = readers(self._url, size=READERS)
                await self._pool  # connects to nothing yet
            rows: list[Any] = await self._pool.fetch(query, *values)
        except AWAY as error:
            raise Refused(Code.UNAVAILABLE, f"the log can't be read now: {error!r}", retry_after_ms=2000) from error
        return rows


def _where(first: str, value: object, *, stream: str | None = None, type: str | None = None) -> list[tuple[str, object]]:
    parts: list[tuple[str, object]] = [(first, value)]
    if stream is not None:
        parts.append(("stream = {}", stream))
    if type is not None:
        parts.append(("type = {}", type))
    return parts
