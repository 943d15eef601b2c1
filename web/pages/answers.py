"""HTML answers: whole pages, fragments, and errors that a person can read."""

from collections.abc import Mapping
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException

from controlplane.refusal import Refused
from web.complaint import complaint
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


def page(
    stage: Stage, name: str, *, here: str = "", status: int = 200, retry_s: int | None = None, **values: object
) -> Response[str]:
    headers = None if retry_s is None else {"retry-after": str(retry_s)}
    return html(stage.templates.page(name, here=here, **{"now_ms": now_ms(), **values}), status, headers)


def again_s(refused: Refused) -> int | None:
    """After how many seconds it is worth another try; None: it never is, or nobody knows."""
    return -(-refused.retry_after_ms // 1000) if refused.retry_after_ms else None


def said(request: Request[Any, Any, Any], refused: Refused | HTTPException) -> Response[str]:
    """Errors of the pages: a line beside the button for htmx, a page for everybody else."""
    stage = stage_of(request)
    if isinstance(refused, Refused):
        status, code, message, retry_s = STATUS[refused.code], refused.code.value, refused.message, again_s(refused)
    else:
        param, what = complaint(request, refused)
        status, code, message, retry_s = refused.status_code, "", f"{param}: {what}" if param else what, None
    if request.headers.get("hx-request"):
        error = {"message": message, "code": code or str(status)}
        return html(stage.templates.page("said.html", error=error, retry_s=retry_s), status)
    title = "Not found" if status == 404 else "That did not work"
    return page(stage, "message.html", title=title, message=message, code=code, status=status, retry_s=retry_s)
