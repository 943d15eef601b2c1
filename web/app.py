"""The Litestar application: its routes, its errors, its schema; behind the gate."""

from typing import Any, Final

import structlog
from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.exceptions import HTTPException, MethodNotAllowedException
from litestar.openapi.config import OpenAPIConfig
from litestar.types import ASGIApp, ControllerRouterHandler

from controlplane.lean import without
from controlplane.quantities import human_bytes
from controlplane.refusal import Refused
from web import health, login, metrics
from web.auth import Gate
from web.complaint import allowed, complaint, for_a_person
from web.errors import ApiError
from web.head import Head
from web.openai.routes import router as openai
from web.pages import router as pages
from web.pages import static
from web.pages.answers import said
from web.rest.routes import router as rest
from web.schema import Schema
from web.services import Services

_log = structlog.get_logger(__name__)

BODY_LIMIT: Final = 8 << 20
"""A million tokens of text; larger bodies are refused with 413 before they are read."""


def create_app(services: Services) -> Litestar:
    """The application without the gate (`guarded`)."""
    handlers: list[ControllerRouterHandler] = [
        openai, rest, health.livez, health.readyz, login.login, login.login_with_token, login.logout, metrics.Metrics,
        pages, static,
    ]  # fmt: skip
    with without("pydantic"):  # its plugin for that would import it, and no handler here speaks of such models
        return _app(handlers, services)


def _app(handlers: list[ControllerRouterHandler], services: Services) -> Litestar:
    return Litestar(
        route_handlers=handlers,
        state=State({
            "services": services, "view": services.view, "operator": services.operator, "plane": services.plane,
            "bus": services.bus, "health": services.health,
            "stage": services.stage,
        }),
        exception_handlers={
            ApiError: _api_error, Refused: _refused, HTTPException: _http_error, RecursionError: _too_deep, Exception: _crashed,
        },
        middleware=[metrics.config.middleware],
        request_max_body_size=BODY_LIMIT,
        logging_config=None,
        openapi_config=OpenAPIConfig(title="enginehouse", version="1", path="/api/schema", render_plugins=[Schema()]),
        debug=False,
    )  # fmt: skip


def guarded(app: Litestar, services: Services) -> ASGIApp:
    """The application behind the gate: what is served."""
    return Head(Gate(app, services.keyring, services.sessions, services.plane.web_host))


def _api_error(request: Request[Any, Any, Any], error: ApiError) -> Response[bytes]:
    return Response(
        error.body(request.url.path), status_code=error.status, headers=error.headers, media_type="application/json"
    )


def _refused(request: Request[Any, Any, Any], error: Refused) -> Response[bytes]:
    return _api_error(request, ApiError.of(error))


def _http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes] | Response[str]:
    """Litestar's own: unknown paths, wrong methods, bad parameters, bodies that are too large."""
    if for_a_person(request):
        return said(request, error)
    param, message = complaint(request, error)
    code = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}.get(error.status_code, "invalid")
    if error.status_code == 413:
        message = f"the body is larger than {human_bytes(BODY_LIMIT)}"
    shaped = ApiError(error.status_code, code, message, param=param)
    response = _api_error(request, shaped)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    if isinstance(error, MethodNotAllowedException):
        response.headers["allow"] = ", ".join(allowed(request, error))
    return response


def _too_deep(request: Request[Any, Any, Any], error: RecursionError) -> Response[bytes]:
    """Nothing else in here recurses: it was the JSON reader, at a body of brackets."""
    return _api_error(request, ApiError(400, "invalid", "the body is nested too deeply to be read"))


def _crashed(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    _log.error("route_failed", path=request.url.path, method=request.method, exc_info=error)
    return _api_error(request, ApiError(500, "internal", "the web process failed; its log says more"))
