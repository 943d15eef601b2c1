"""The live page, its stream, and the buttons on it."""

from typing import Any
from urllib.parse import quote

from litestar import Request, Response, asgi, get, post
from litestar.params import FromPath
from litestar.types import Receive, Scope, Send

from controlplane.answer import Opened
from controlplane.refusal import Code, Refused
from web.live.stream import stream
from web.pages.answers import html, page, stage_of
from web.pages.stage import Stage
from web.views.scene import event_list, request_log

AGGREGATES = ("instance", "model", "request", "operation", "device", "weights", "configuration", "node", "gateway", "decider")


@get("/", include_in_schema=False)
async def live_page(request: Request[Any, Any, Any]) -> Response[str]:
    stage = stage_of(request)
    # The mark is older than the state that is drawn, never newer: what lies between is sent again, not missed.
    mark = stage.hub.mark
    return page(
        stage, "live.html", here="live", mark=mark, scene=stage.painter.scene(),
        log=request_log(stage.sight.fleet, stage.painter.recent), events=event_list(stage.sight.fleet, stage.painter.recent),
        aggregates=AGGREGATES,
    )  # fmt: skip


@asgi("/live", copy_scope=False)
async def live_stream(scope: Scope, receive: Receive, send: Send) -> None:
    stage: Stage = scope["litestar_app"].state.stage
    await stream(stage.hub, scope, receive, send)


@post("/models/{model:str}/operations", include_in_schema=False, status_code=200)
async def operate(request: Request[Any, Any, Any], model: FromPath[str]) -> Response[str]:
    """A button: form field `verb`. Answers a line for the button's row, or sends a browser without scripts back."""
    stage = stage_of(request)
    form = await request.form()
    verb = str(form.get("verb", ""))
    actor = getattr(request.scope.get("user"), "actor", "operator:browser")
    if stage.sight.fleet.resolve(model) is None:
        raise Refused(Code.MODEL_UNKNOWN, f"there is no model {model!r}; it may have been retired: load the page again")
    answered = await stage.operate(verb, model, actor)
    if not request.headers.get("hx-request"):
        return html("", 303, {"location": f"/models/{quote(model)}"})
    operation = answered.operation if isinstance(answered, Opened) else None
    words = f"{verb} requested" if operation or answered.position else "nothing had to change"
    return html(stage.templates.page("said.html", error=None, words=words, operation=operation))
