"""Logging in with a one-time link or a token, and out again."""

from typing import Annotated, Any, Final

from litestar import Request, Response, get, post
from litestar.datastructures import Cookie
from litestar.params import QueryParameter
from markupsafe import escape

from web.auth import session_value
from web.complaint import for_a_person
from web.errors import ApiError
from web.sessions import SESSION_S
from web.tokens import drop_old_codes, split, use_login_code

PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>enginehouse: log in</title>
<meta name="viewport" content="width=device-width">
<link rel="icon" href="/static/icon.svg"><link rel="stylesheet" href="/static/base.css"></head>
<body><main class="login"><h1><img src="/static/icon.svg" alt="" width="22" height="22"> enginehouse</h1>
<p>Open the link that <code>enginehouse up</code> printed, or make a new one on that machine with
<code>enginehouse login</code>. A link is good once, for ten minutes.</p>
{said}<form method="post" action="/login"><label>Or give an API token of scope admin
<input name="token" type="password" autocomplete="off" required autofocus></label>
<button class="go">Log in</button></form></main></body></html>
"""


def _form(said: str = "", status: int = 200) -> Response[bytes]:
    line = f'<p role="alert">{escape(said)}</p>' if said else ""
    return Response(PAGE.replace("{said}", line).encode(), status_code=status, media_type="text/html")


def _not_entered(request: Request[Any, Any, Any], error: ApiError) -> Response[bytes]:
    if for_a_person(request):
        said = "this token is not valid: it is wrong, or was revoked" if error.status == 401 else error.message
        return _form(f"{said[0].upper()}{said[1:]}.", error.status)
    return Response(error.plain(), status_code=error.status, headers=error.headers, media_type="application/json")


@get("/login", include_in_schema=False, exception_handlers={ApiError: _not_entered})
async def login(
    request: Request[Any, Any, Any], code: Annotated[str | None, QueryParameter(max_length=200)] = None
) -> Response[bytes]:
    """With a code from a login link: a session. Without, or with one that is used up: a form."""
    if code is None:
        return _form()
    services = request.app.state.services
    services.sessions.allow_attempt()
    drop_old_codes(services.data)
    if not use_login_code(services.data, code):
        services.sessions.failed()
        raise ApiError(403, "login_code", "this login link was used already, or is too old; make one with 'enginehouse login'")
    return _entered(request, services.sessions.issue())


@post("/login", status_code=303, include_in_schema=False, exception_handlers={ApiError: _not_entered})
async def login_with_token(request: Request[Any, Any, Any]) -> Response[bytes]:
    """The form: a token of scope `admin` gives a session."""
    services = request.app.state.services
    services.sessions.allow_attempt()
    token = str((await request.form()).get("token", "")).strip()
    try:
        identity = await services.keyring.identify(token)
    except ApiError as error:
        if error.status == 401:
            services.sessions.failed()
        raise
    if identity.scope != "admin":
        raise ApiError(403, "scope", f"token '{identity.name}' is for /v1 only; the pages need one of scope 'admin'")
    name, _ = split(token) or ("", "")
    return _entered(request, services.sessions.issue(name))


@post("/logout", status_code=303, include_in_schema=False)
async def logout(request: Request[Any, Any, Any]) -> Response[bytes]:
    sessions = request.app.state.services.sessions
    value = session_value(request.headers, sessions.cookie)
    if value is not None:
        sessions.revoke(value)
    return Response(b"", status_code=303, headers={"location": "/login"}, cookies=[_cookie(request, "", 0)])


def _entered(request: Request[Any, Any, Any], value: str) -> Response[bytes]:
    return Response(b"", status_code=303, headers={"location": "/"}, cookies=[_cookie(request, value, SESSION_S)])


def _cookie(request: Request[Any, Any, Any], value: str, max_age: int) -> Cookie:
    """A proxy that speaks TLS says so, and then the cookie never goes without; whoever lies here hurts their own browser."""
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
    name = request.app.state.services.sessions.cookie
    return Cookie(key=name, value=value, max_age=max_age, path="/", httponly=True, samesite="strict", secure=secure)
