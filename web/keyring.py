"""Checks callers' tokens. Known ones are kept for a while, so an outage of Postgres turns no valid token into a wrong one."""

import asyncio
import time
from typing import Final

import asyncpg
import msgspec
import structlog

from controlplane.log.postgres import AWAY
from web.errors import ApiError
from web.tokens import Scope, matches, split

_log = structlog.get_logger(__name__)

TTL_S: Final = 5.0
"""A revoked token stops working within this time."""
LOOKUP_S: Final = 2.0
LOOKUPS: Final = 4
"""Of tokens not seen before, at once: they must crowd out neither everything else nor the renewal of known ones."""
KNOWN_LIMIT: Final = 10_000


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. `actor` is what events record."""

    name: str
    scope: Scope
    cookie: bool = False
    """From a browser's session: state-changing requests need the same origin."""

    @property
    def actor(self) -> str:
        return f"operator:{self.name}"


class _Known(msgspec.Struct):
    name: str
    scope: Scope
    stored: bytes
    checked_at: float


class Keyring:
    """Tokens that were valid when last looked up. `async with` it."""

    def __init__(self, postgres_url: str) -> None:
        self._url = postgres_url
        self._known: dict[str, _Known] = {}
        self._pool: asyncpg.Pool | None = None
        self._slots = asyncio.Semaphore(LOOKUPS)
        self._renewing: dict[str, asyncio.Task[None]] = {}

    async def identify(self, token: str) -> Identity:
        """Return whose token it is. Raises ApiError: 401 when it is nobody's, 503 when that can't be told now."""
        parts = split(token)
        if parts is None:
            raise wrong()
        name, secret = parts
        known = self._known.get(name)
        if known is not None and matches(secret, known.stored):
            if time.monotonic() - known.checked_at > TTL_S:
                await self._renew(name)
                known = self._known.get(name)
                if known is None:
                    raise wrong()
            return Identity(name=known.name, scope=known.scope)
        found = await self._find(name)
        if found is None or not matches(secret, found.stored):
            raise wrong()
        self._learn(name, found)
        return Identity(name=found.name, scope=found.scope)

    async def opener(self, name: str) -> Identity:
        """Whose token, by its id, opened a session: revoked, it ends that too. Raises ApiError as `identify` does."""
        if (known := self._known.get(name)) is None:
            if (known := await self._find(name)) is not None:
                self._learn(name, known)
        elif time.monotonic() - known.checked_at > TTL_S:
            await self._renew(name)
            known = self._known.get(name)
        if known is None:
            raise wrong()
        return Identity(name=known.name, scope=known.scope, cookie=True)

    def _learn(self, name: str, found: _Known) -> None:
        if len(self._known) >= KNOWN_LIMIT:
            self._known.clear()
        self._known[name] = found

    async def _find(self, name: str) -> _Known | None:
        """Look a token up that is not known yet. Raises ApiError (503)."""
        try:
            async with asyncio.timeout(LOOKUP_S), self._slots:
                return await self._look_up(name)
        except AWAY as error:
            _log.warning("token_not_checked", reason=repr(error))
            message = "the database that holds the tokens does not answer, and this token was not seen before; try again"
            raise ApiError(503, "unavailable", message, retry_after_ms=2000) from error

    async def _renew(self, name: str) -> None:
        """Look a known token up again; concurrent callers share one look-up, an outage lets it stay."""
        task = self._renewing.get(name)
        if task is None:
            task = self._renewing[name] = asyncio.ensure_future(self._renewed(name))
            task.add_done_callback(lambda _: self._renewing.pop(name, None))
        await asyncio.shield(task)

    async def _renewed(self, name: str) -> None:
        try:
            found = await self._look_up(name)
        except AWAY as error:
            _log.warning("token_not_renewed", token=name, reason=repr(error))
            if (known := self._known.get(name)) is not None:
                known.checked_at = time.monotonic()
            return
        if found is None:
            self._known.pop(name, None)
        else:
            self._known[name] = found

    async def _look_up(self, name: str) -> _Known | None:
        async with asyncio.timeout(LOOKUP_S):
            pool = await self._connected()
            row = await pool.fetchrow("select name, scope, hash from token where id = $1 and revoked_at is null", name)
        if row is None:
            return None
        return _Known(name=row["name"], scope=row["scope"], stored=bytes(row["hash"]), checked_at=time.monotonic())

    async def _connected(self) -> "asyncpg.Pool":
        if self._pool is None:
            pool = asyncpg.create_pool(self._url, min_size=0, max_size=2 * LOOKUPS, max_inactive_connection_lifetime=60)
            self._pool = pool
            await pool
        return self._pool

    async def close(self) -> None:
        for task in tuple(self._renewing.values()):
            task.cancel()
        if self._pool is not None:
            self._pool.terminate()


def wrong() -> ApiError:
    message = "this token is not valid (wrong, or revoked); send 'Authorization: Bearer eh_...' with a valid one"
    return ApiError(401, "invalid_api_key", message)


def missing() -> ApiError:
    return ApiError(401, "missing_api_key", "no token was sent; send 'Authorization: Bearer eh_...'")
