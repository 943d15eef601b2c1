"""The log itself: events by page, one event, and all new ones as a stream."""

from typing import Annotated

from litestar import Response, get
from litestar.openapi import ResponseSpec
from litestar.params import HeaderParameter, PathParameter, QueryParameter
from litestar.response import Stream

from controlplane.envelope import Wire, to_wire
from web.errors import ApiError
from web.rest.asking import Ask, services_of
from web.rest.fleet import Position
from web.rest.following import feed
from web.rest.operations import Limit
from web.views.devicenames import names_of, stream_meant
from web.views.eventfilters import wrong_stream, wrong_type

Name = Annotated[str | None, QueryParameter(max_length=200)]


def _meant(request: Ask, stream: str | None, kind: str | None) -> str | None:
    """A device's stream may be asked for by the device's name, too. Raises ApiError for what nothing can match."""
    if kind is not None and (wrong := wrong_type(kind)):
        raise ApiError(400, "invalid", wrong, param="type")
    if stream is not None and (wrong := wrong_stream(stream)):
        raise ApiError(400, "invalid", wrong, param="stream")
    return None if stream is None else stream_meant(stream, names_of(services_of(request).view.fleet))


@get(
    "/events", description="With `after` in order from there; with `before` (or nothing) the newest first. Not both.",
    responses={200: ResponseSpec(list[Wire], False, "Events")},
)  # fmt: skip
async def events(
    request: Ask, *, after: Position = None, before: Position = None, limit: Limit = 100, stream: Name = None, type: Name = None
) -> Response[bytes]:
    past = services_of(request).history
    stream = _meant(request, stream, type)
    if after is not None and before is not None:
        raise ApiError(400, "invalid", "'after' reads forwards and 'before' backwards: send one of them", param="before")
    if after is not None:
        found = await past.events_after(after, limit=limit, stream=stream, type=type)
    else:
        found = await past.page_of_events(before=before, limit=limit, stream=stream, type=type)
    return Response(b"[" + b",".join(to_wire(recorded) for recorded in found) + b"]", media_type="application/json")


@get("/events/{position:int}", responses={200: ResponseSpec(Wire, False, "The event")})
async def event(request: Ask, position: Annotated[int, PathParameter(ge=1, le=2**62)]) -> Response[bytes]:
    found = await services_of(request).history.events_after(position - 1, limit=1)
    if not found or found[0].position != position:
        raise ApiError(404, "event_unknown", f"the log has no event {position} yet", details={"position": position})
    return Response(to_wire(found[0]), media_type="application/json")


@get(
    "/events/follow", description="Server-sent events: all after `after` (default: from now on), with positions as ids.",
    responses={200: ResponseSpec(str, False, "The stream", media_type="text/event-stream")},
)  # fmt: skip
async def follow_events(
    request: Ask, *, after: Position = None, stream: Name = None, type: Name = None,
    last: Annotated[int | None, HeaderParameter(name="Last-Event-ID", ge=0, le=2**62)] = None,
) -> Stream:  # fmt: skip
    services = services_of(request)
    start = last if last is not None else after
    wanted = _meant(request, stream, type)
    events = feed(services, services.view.fleet.position if start is None else start, wanted, type)
    return Stream(events, media_type="text/event-stream", headers={"cache-control": "no-store", "x-accel-buffering": "no"})
