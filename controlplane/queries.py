"""Reading what is not in the live state: the history, finished requests and operations, tokens, bodies. For web and the CLI.

Rows of history are the events themselves: the event that ends a request or an operation holds all that a row shows.
Where a list can be long it is paged by position: `before` the last one seen.
"""

from datetime import UTC, datetime
from typing import Any, Final, Self

import asyncpg
import msgspec
from sqlalchemy import ColumnElement, Select, and_, column, func, insert, literal_column, or_, select, table, update
from sqlalchemy import event as hooks
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from controlplane.envelope import Recorded
from controlplane.log.postgres import COLUMNS, CONNECT_S, READERS, recorded

_EVENT: Final = table("event", *(column(name) for name in ("position", "stream", "version", "type", "operation", "data")))
_TOKEN: Final = table("token", *(column(name) for name in ("id", "name", "hash", "scope", "created_at", "revoked_at")))
_BODY: Final = table("request_body", *(column(name) for name in ("request", "digest", "body", "written_at")))
# Literals, not parameters: the planner uses a partial index only where it can see that the condition is its own.
_ENDED_REQUEST: Final[ColumnElement[bool]] = literal_column("type in ('RequestFinished', 'RequestFailed', 'RequestCancelled')")
_OF_MODEL: Final[ColumnElement[str]] = literal_column("data ->> 'model'")
_ENDED_OPERATIONS: Final = ("OperationSucceeded", "OperationFailed")
MOST: Final = 1_000
"""Rows of one page, whatever is asked for."""


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """An API token as it is kept: its secret only as a hash."""

    id: str
    name: str
    scope: str
    """`admin` (everything) or `inference` (only /v1)."""
    created_at: datetime
    revoked_at: datetime | None = None


class Queries:
    """`open` makes the pool (it connects when first asked); `close` ends it. Methods raise what SQLAlchemy raises."""

    def __init__(self, pool: AsyncEngine) -> None:
        self.pool = pool

    @classmethod
    def open(cls, postgres_url: str) -> Self:
        return cls(_engine(postgres_url))

    async def close(self) -> None:
        await self.pool.dispose()

    async def head(self) -> int:
        """The log's last position."""
        async with self.pool.connect() as connection:
            found: int = (await connection.execute(select(literal_column("position")).select_from(table("head")))).scalar_one()
            return found

    async def events(
        self, *, after: int | None = None, before: int | None = None, limit: int = 100, stream: str | None = None,
        type: str | None = None,
    ) -> list[Recorded]:  # fmt: skip
        """Events above `after`, oldest first; without `after`, those below `before` (or the end), newest first."""
        wanted: list[ColumnElement[bool]] = []
        if stream is not None:
            wanted.append(_EVENT.c.stream == stream)
        if type is not None:
            wanted.append(_EVENT.c.type == type)
        if before is not None:
            wanted.append(_EVENT.c.position < before)
        if after is not None:
            return await self._events([*wanted, _EVENT.c.position > after], limit, oldest_first=True)
        return await self._events(wanted, limit)

    async def requests(
        self, *, model: str | None = None, before: int | None = None, since_ms: int | None = None, until_ms: int | None = None,
        limit: int = 50,
    ) -> list[Recorded]:  # fmt: skip
        """Ended requests, newest first: each the RequestFinished, RequestFailed or RequestCancelled that ended it.

        `since_ms` and `until_ms` (Unix milliseconds) bound the time of the end.
        """
        wanted: list[ColumnElement[bool]] = [_ENDED_REQUEST]
        if model is not None:
            wanted.append(_OF_MODEL == model)  # noqa: SIM300 (a column, whose == makes SQL)
        if before is not None:
            wanted.append(_EVENT.c.position < before)
        if since_ms is not None:
            wanted.append(_EVENT.c.position >= await self.first_since(since_ms))
        if until_ms is not None:
            wanted.append(_EVENT.c.position < await self.first_since(until_ms))
        return await self._events(wanted, limit)

    async def request(self, request: str) -> list[Recorded]:
        """Everything that happened to one request, oldest first; empty: unknown."""
        return await self._events([_EVENT.c.stream == f"request:{request}"], MOST, oldest_first=True)

    async def operations(self, *, before: int | None = None, limit: int = 50) -> list[Recorded]:
        """Ended operations, newest first: each the OperationSucceeded or OperationFailed that ended it."""
        pages = [await self.events(before=before, limit=limit, type=name) for name in _ENDED_OPERATIONS]
        return sorted((event for page in pages for event in page), key=lambda event: -event.position)[:limit]

    async def operation(self, operation: str) -> list[Recorded]:
        """Every event that belongs to one operation, oldest first; empty: unknown."""
        return await self._events(
            [or_(_EVENT.c.operation == operation, _EVENT.c.stream == f"operation:{operation}")], MOST, oldest_first=True
        )

    async def first_since(self, at_ms: int) -> int:
        """Position of the first event at or after `at_ms` (Unix milliseconds); the head + 1 when there is none."""
        async with self.pool.connect() as connection:
            found: int = (await connection.execute(select(func.first_since(at_ms)))).scalar_one()
            return found

    async def token(self, digest: bytes) -> Token | None:
        """The token whose secret has this SHA-256, unless it was revoked."""
        wanted = and_(_TOKEN.c.hash == digest, _TOKEN.c.revoked_at.is_(None))
        found = await self._tokens(_tokens().where(wanted))
        return found[0] if found else None

    async def tokens(self) -> list[Token]:
        """All tokens, revoked ones too, oldest first."""
        return await self._tokens(_tokens().order_by(_TOKEN.c.created_at, _TOKEN.c.id))

    async def add_token(self, *, id: str, name: str, digest: bytes, scope: str = "admin") -> None:
        """Keep a token by the SHA-256 of its secret. Raises sqlalchemy.exc.IntegrityError when id or secret is taken."""
        async with self.pool.connect() as connection:
            await connection.execute(insert(_TOKEN).values(id=id, name=name, hash=digest, scope=scope))

    async def revoke_token(self, id: str) -> bool:
        """Revoke a token; False: there is none, or it was revoked before."""
        wanted = and_(_TOKEN.c.id == id, _TOKEN.c.revoked_at.is_(None))
        async with self.pool.connect() as connection:
            done = await connection.execute(update(_TOKEN).where(wanted).values(revoked_at=func.now()))
            return done.rowcount > 0

    async def save_body(self, request: str, digest: str, body: bytes) -> None:
        """Keep a request's body; a second one of the same request is ignored."""
        values = {"request": request, "digest": digest, "body": body}
        async with self.pool.connect() as connection:
            await connection.execute(upsert(_BODY).values(values).on_conflict_do_nothing())

    async def body(self, request: str) -> bytes | None:
        async with self.pool.connect() as connection:
            found: bytes | None = (await connection.execute(select(_BODY.c.body).where(_BODY.c.request == request))).scalar()
            return found

    async def drop_bodies(self, before_ms: int) -> int:
        """Delete bodies written before `before_ms` (Unix milliseconds); return how many."""
        async with self.pool.connect() as connection:
            limit = datetime.fromtimestamp(before_ms / 1000, UTC)
            return (await connection.execute(_BODY.delete().where(_BODY.c.written_at < limit))).rowcount

    async def _events(self, wanted: list[ColumnElement[bool]], limit: int, *, oldest_first: bool = False) -> list[Recorded]:
        order = _EVENT.c.position if oldest_first else _EVENT.c.position.desc()
        query: Select[Any] = (
            select(literal_column(COLUMNS)).select_from(_EVENT).where(*wanted).order_by(order).limit(min(limit, MOST))
        )
        async with self.pool.connect() as connection:
            return [recorded(row) for row in await connection.execute(query)]

    async def _tokens(self, query: Select[Any]) -> list[Token]:
        async with self.pool.connect() as connection:
            rows = await connection.execute(query)
            return [Token(id=id_, name=name, scope=scope, created_at=at, revoked_at=end) for id_, name, scope, at, end in rows]


def _tokens() -> Select[Any]:
    return select(_TOKEN.c.id, _TOKEN.c.name, _TOKEN.c.scope, _TOKEN.c.created_at, _TOKEN.c.revoked_at)


def _engine(url: str) -> AsyncEngine:
    """An engine for a URL as asyncpg reads it (`?host=` may name a socket directory), without transactions of its own."""

    async def connect() -> Any:
        return await asyncpg.connect(url, timeout=CONNECT_S)

    made = create_async_engine(
        "postgresql+asyncpg://", async_creator=connect, isolation_level="AUTOCOMMIT", pool_size=READERS, max_overflow=READERS
    )
    hooks.listen(made.sync_engine, "checkout", _fresh)
    return made


def _fresh(connection: Any, *_: object) -> None:
    """Have the pool replace a connection that its server has ended: errors of the driver pass the pool by unseen."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError("the server has closed it")
