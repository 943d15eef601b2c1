"""HTML answers: whole pages, fragments, and errors that a person can read."""

from collections.abc import Mapping
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException, ValidationException

from controlplane.refusal import Refused
from web.errors import STATUS
from web.pages.stage import Stage, now_ms


def stage_of(request: Request[Any, Any, Any]) -> Stage:
    stage: Stage = request.app.state.stage
    return stage


def html(text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response[str]:
    """A page that is never kept by a cache: it shows the state of this moment."""
    return Response(
        text, status_code=status, media_type=MediaType.HTML, headers={"cache-control": "no-store", **(headers or {})}
    )


def page(stage: Stage, name: str, *, here: str = "", status: int = 200, **values: object) -> Response[str]:
    return html(stage.templates.page(name, here=here, now_ms=now_ms(), **values), status)


def for_a_person(request: Request[Any, Any, Any]) -> bool:
    """Whether a browser asks for a page, and no program for data."""
    return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith(("/v1", "/api"))


def complaint(error: HTTPException) -> tuple[str | None, str]:
    """Which parameter is wrong, if one is, and what is wrong."""
    if not (isinstance(error, ValidationException) and isinstance(error.extra, list) and error.extra):
        return None, error.detail
    first = error.extra[0]
    param, message = str(first.get("key") or "") or None, str(first.get("message", error.detail))
    if param == "data" and message == "'data'":  # a missing body is a KeyError to the framework
        return None, "the request has no body; send JSON"
    return param, message


def said(request: Request[Any, Any, Any], refused: Refused | HTTPException) -> Response[str]:
    """Errors of the pages: a line beside the button for htmx, a page for everybody else."""
    stage = stage_of(request)
    if isinstance(refused, Refused):
        status, code, message = STATUS[refused.code], refused.code.value, refused.message
        retry_s = -(-refused.retry_after_ms // 1000) if refused.retry_after_ms else None
    else:
        param, what = complaint(refused)
        status, code, message, retry_s = refused.status_code, "", f"{param}: {what}" if param else what, None
    if request.headers.get("hx-request"):
        error = {"message": message, "code": code or str(status)}
        return html(stage.templates.page("said.html", error=error, retry_s=retry_s), status)
    title = "Not found" if status == 404 else "That did not work"
    return page(stage, "message.html", title=title, message=message, code=code, status=status)
