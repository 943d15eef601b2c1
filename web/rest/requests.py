"""Requests: open ones from the view, ended ones from the log; cancelling one."""

from typing import Annotated, Literal

from litestar import Response, delete, get
from litestar.params import FromPath, QueryParameter

from controlplane.commands import CancelRequest
from controlplane.envelope import Recorded
from controlplane.events import RequestAccepted, RequestCancelled, RequestFailed, RequestFinished
from web.errors import ApiError
from web.rest import portray, shapes
from web.rest.asking import Accepted, Ask, Changed, Key, answered, command, fleet_after, services_of
from web.rest.fleet import Position
from web.rest.operations import Limit
from web.views.requests import counted

State = Literal["open", "finished", "failed", "cancelled"]


@get("/requests", description="Newest first. Without `state`: open ones, then ended ones. `before`: a position of the log.")
async def request_log(
    request: Ask, *, after: Position = None, before: Position = None, limit: Limit = 100,
    model: Annotated[str | None, QueryParameter(max_length=100)] = None,
    standing: Annotated[State | None, QueryParameter(name="state")] = None,
) -> list[shapes.RequestView]:  # fmt: skip
    services = services_of(request)
    fleet = await fleet_after(services, after)
    shown: list[shapes.RequestView] = []
    if standing in (None, "open") and before is None:
        still_open = sorted(fleet.requests.values(), key=lambda known: -known.order)
        picked = [known for known in still_open if model in (None, known.model)][:limit]
        shown = [portray.request(known, services.view.place(known.request)) for known in picked]
    if standing != "open" and len(shown) < limit:
        past = await services.history.page_of_ended(before=before, limit=limit - len(shown), model=model, outcome=standing)
        shown += [ended(recorded) for recorded in past]
    return shown


@get("/requests/{name:str}")
async def single_request(request: Ask, name: FromPath[str], after: Position = None) -> shapes.RequestView:
    services = services_of(request)
    fleet = await fleet_after(services, after)
    known = fleet.requests.get(name)
    if known is not None:
        return portray.request(known, services.view.place(name))
    events = await services.history.of_stream(f"request:{name}")
    if not events:
        raise ApiError(404, "request_unknown", f"there is no request {name[:100]!r}", details={"request": name[:100]})
    return ended(events[-1])


@delete("/requests/{name:str}", status_code=202, summary="Cancel a request, wherever it is")
async def cancel_request(request: Ask, name: FromPath[str], key: Key = None) -> Response[Changed | Accepted]:
    return answered(await command(request, CancelRequest(request=name)))


def ended(recorded: Recorded) -> shapes.RequestView:
    """What the event that ended a request says of it."""
    event = recorded.event
    if not isinstance(event, RequestFinished | RequestFailed | RequestCancelled):
        return _begun(recorded)
    state, finish, code, reason, by, phase = "cancelled", "", "", "", "", ""
    match event:
        case RequestFinished():
            state, finish = "finished", event.finish_reason
        case RequestFailed():
            state, code, reason = "failed", event.code, event.message
        case RequestCancelled():
            by, phase = event.by, event.phase
    known = counted(event)
    return shapes.RequestView(
        request=event.request, model=event.model, state=state, kind=event.kind, streamed=event.streamed,
        accepted_ms=event.accepted_ms, instance=event.instance, attempts=event.attempts, code=code, reason=reason,
        prompt_tokens=event.prompt_tokens if known else None,
        completion_tokens=event.completion_tokens if known else None, queued_ms=event.queued_ms,
        first_token_ms=event.first_token_ms, took_ms=event.took_ms, finish_reason=finish, by=by, phase=phase,
    )  # fmt: skip


def _begun(recorded: Recorded) -> shapes.RequestView:
    """A request that the log knows and the view does not hold yet."""
    event = recorded.event
    return shapes.RequestView(
        request=getattr(event, "request", ""), model=getattr(event, "model", ""), state="queued",
        kind=event.kind if isinstance(event, RequestAccepted) else "", streamed=getattr(event, "streamed", False),
        accepted_ms=recorded.at_ms,
    )  # fmt: skip
