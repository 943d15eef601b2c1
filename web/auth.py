"""The gate before every route: the Host header, who asks, what they may, and the headers that every answer carries."""

import asyncio
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import urlsplit

from litestar.datastructures import Headers
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from markupsafe import escape

from web.errors import ApiError
from web.keyring import Identity, Keyring, missing
from web.sessions import Sessions

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARD: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 (compared with, not bound to)
OPEN: Final = frozenset({"/livez", "/readyz", "/login", "/favicon.ico"})
OPEN_UNDER: Final = "/static/"
WATCH_S: Final = 2.0
"""What runs for a token that is revoked ends within this time and the keyring's: it is the keyring that is looked at so often,
which asks the database once for all that runs for a token."""
UNAUTHORIZED: Final = 401
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY: Final = [
    (b"content-security-policy", CSP.encode()), (b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"), (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]  # fmt: skip


class Credential:
    """What a caller showed at the gate: it is looked at again for as long as what it opened goes on."""

    def __init__(self, headers: Headers, identify: Callable[[Headers], Awaitable[Identity | None]]) -> None:
        self._headers, self._identify = headers, identify

    async def outlasts(self, *waited: "asyncio.Future[Any]") -> ApiError | None:
        """Wait for the first of `waited` to be done. Return why not, if the token or session has ended before (401)."""
        while not (await asyncio.wait(waited, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            if (error := await self._lapsed()) is not None:
                return error
        return None

    async def _lapsed(self) -> ApiError | None:
        try:
            if await self._identify(self._headers) is None:
                return ApiError(UNAUTHORIZED, "session_over", "this browser's session has ended; log in again")
        except ApiError as error:
            if error.status == UNAUTHORIZED:  # else it can't be told now
                message = "the token was revoked while this request ran, which has been ended; ask with a valid one"
                return ApiError(UNAUTHORIZED, "token_revoked", message)
        return None


class Gate:
    """ASGI middleware. Leaves in `scope["user"]` the caller's `Identity` (None on open paths), and in `scope["auth"]` the
    `Credential` that it was told by."""

    def __init__(self, app: ASGIApp, keyring: Keyring, sessions: Sessions, host: str) -> None:
        self._app, self._keyring, self._sessions = app, keyring, sessions
        self._hosts = None if host in WILDCARD else LOOPBACK | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            return  # there is nothing but HTTP here
        http = scope
        send = _secured(send)
        try:
            scope["user"] = await self._admit(http)
        except ApiError as error:
            await _refuse(http, send, error)
            return
        credential = scope["auth"] = Credential(Headers.from_scope(http), self._identify)
        await self._app(scope, _watched(receive, credential) if scope["user"] and scope["method"] in SAFE else receive, send)

    async def _admit(self, scope: HTTPScope) -> Identity | None:
        headers = Headers.from_scope(scope)
        host = headers.get("host", "")
        if self._hosts is not None and _hostname(host) not in self._hosts:
            message = f"Host {host[:100]!r} is not this server; a page of another site can't use it"
            raise ApiError(421, "wrong_host", message)
        path = scope["path"]
        free = path in OPEN or path.startswith(OPEN_UNDER)
        try:
            identity = await self._identify(headers)
        except ApiError:
            if free and "authorization" not in headers:  # whoever's session has ended may log in anew
                return None
            raise
        if identity is None:
            if free:
                return None
            raise missing()
        if identity.scope != "admin" and not (path.startswith("/v1/") or path in OPEN):
            message = f"token '{identity.name}' is for /v1 only; this needs one of `enginehouse token new NAME --scope admin`"
            raise ApiError(403, "scope", message)
        if identity.cookie and scope["method"] not in SAFE:
            _same_origin(headers, host)
        return identity

    async def _identify(self, headers: Headers) -> Identity | None:
        authorization = headers.get("authorization")
        if authorization is not None:
            kind, _, token = authorization.partition(" ")
            if kind.lower() != "bearer":
                raise missing()
            return await self._keyring.identify(token.strip())
        value = session_value(headers, self._sessions.cookie)
        session = self._sessions.read(value) if value is not None else None
        if session is None:
            return None
        if not session.token:
            return Identity(name="browser", scope="admin", cookie=True)
        return await self._keyring.opener(session.token)


def _watched(receive: Receive, credential: Credential) -> Receive:
    """For streams, which wait here for their reader to go: whose token or session has ended is as good as gone."""

    async def watched() -> Any:
        coming = asyncio.ensure_future(receive())
        try:
            return {"type": "http.disconnect"} if await credential.outlasts(coming) else coming.result()
        finally:
            coming.cancel()

    return watched


def session_value(headers: Headers, cookie: str) -> str | None:
    """The session cookie's value, if the browser sent one."""
    raw = headers.get("cookie")
    if raw is None or cookie not in raw:
        return None
    try:
        morsel = SimpleCookie(raw).get(cookie)
    except CookieError:
        return None
    return morsel.value if morsel is not None else None


def identity_of(scope: Any) -> Identity:
    """Who asks, behind the gate."""
    user = scope.get("user")
    if not isinstance(user, Identity):
        raise missing()
    return user


def _same_origin(headers: Headers, host: str) -> None:
    """Refuse what another site's page sends with our cookie. Browsers say where a request comes from; others have no cookie."""
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if site in ("same-origin", "none") or (site is None and origin is not None and urlsplit(origin).netloc == host):
        return
    message = "this request comes from another site's page (Origin, Sec-Fetch-Site); programs use a token"
    raise ApiError(403, "cross_site", message)


def _hostname(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _secured(send: Send) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            given = {name.lower() for name, _ in headers}
            message["headers"] = headers + [pair for pair in SECURITY if pair[0] not in given]
        await send(message)

    return wrapped


async def _refuse(scope: HTTPScope, send: Send, error: ApiError) -> None:
    """Answer an error; a browser that is merely not logged in is shown the way, and a part of a page is told it as one."""
    path, asked = scope["path"], Headers.from_scope(scope)
    accepts = asked.get("accept", "")
    whole = "text/html" in accepts and "text/event-stream" not in accepts and not asked.get("hx-request")
    if error.status == 401 and scope["method"] == "GET" and whole and not path.startswith(("/v1", "/api")):
        status, body, extra = 303, b"", [(b"location", b"/login")]
    elif asked.get("hx-request"):
        said = "You are signed out. Load this page again to sign in." if error.status == 401 else error.message
        status, body = error.status, f'<p class="bad msg" role="alert">{escape(said)}</p>'.encode()
        extra = [(b"content-type", b"text/html; charset=utf-8")]
    else:
        status, body = error.status, error.body(path)
        extra = [(b"content-type", b"application/json"), *((k.encode(), v.encode()) for k, v in error.headers.items())]
    headers = [*extra, (b"content-length", str(len(body)).encode())]
    start: Any = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})
