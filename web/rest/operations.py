"""Operations: open ones from the view, with progress; ended ones from the log."""

from typing import Annotated, Final

from litestar import get
from litestar.params import FromPath, QueryParameter

from controlplane.envelope import Recorded
from controlplane.events import OperationFailed, OperationRequested, OperationSucceeded
from web.errors import ApiError
from web.rest import portray, shapes
from web.rest.asking import Ask, fleet_after, services_of
from web.rest.fleet import Position
from web.services import Services

Limit = Annotated[int, QueryParameter(ge=1, le=1000)]
WAIT_MOST_S: Final = 60.0
"""Longest `?wait=`: below the idle limits of proxies."""
ENDS: Final = ("OperationSucceeded", "OperationFailed")


@get("/operations", description="Open operations, then ended ones, newest first; with `before` (a position) ended ones only.")
async def operations(
    request: Ask, after: Position = None, before: Position = None, limit: Limit = 100
) -> list[shapes.OperationView]:
    services = services_of(request)
    fleet = await fleet_after(services, after)
    still_open = sorted(fleet.operations.values() if before is None else (), key=lambda known: -known.requested_ms)
    shown = [portray.operation(fleet, services.view.beats, known) for known in still_open][:limit]
    if len(shown) < limit:
        ended = await services.history.page_of_events(before=before, limit=limit - len(shown), types=ENDS)
        asked = await services.history.first_of_operations([_name(recorded) for recorded in ended])
        shown += [_ended(recorded, asked.get(_name(recorded))) for recorded in ended]
    return shown


@get("/operations/{name:str}", description="`wait`: up to so many seconds for its end.")
async def operation(
    request: Ask, name: FromPath[str], after: Position = None,
    wait: Annotated[float, QueryParameter(ge=0, le=WAIT_MOST_S)] = 0,
) -> shapes.OperationView:  # fmt: skip
    services = services_of(request)
    fleet = await fleet_after(services, after)
    if name not in fleet.operations:
        events = await _events(services, name)
        if not isinstance(events[-1].event, OperationRequested):
            return _ended(events[-1], events[0])
        fleet = await fleet_after(services, events[-1].position)  # asked for so lately that the view is behind the log
    if wait and name in fleet.operations:
        try:
            fleet = await services.view.wait_for(lambda now: name not in now.operations, wait)
        except TimeoutError:
            fleet = services.view.fleet
    known = fleet.operations.get(name)
    if known is not None:
        return portray.operation(fleet, services.view.beats, known)
    events = await _events(services, name)
    return _ended(events[-1], events[0])


async def _events(services: Services, name: str) -> list[Recorded]:
    """An operation's events, at least one. Raises ApiError 404."""
    events = await services.history.of_stream(f"operation:{name}")
    if not events:
        raise ApiError(404, "operation_unknown", f"there is no operation {name[:100]!r}", details={"operation": name[:100]})
    return events


def _name(recorded: Recorded) -> str:
    return recorded.stream.partition(":")[2]


def _ended(recorded: Recorded, first: Recorded | None) -> shapes.OperationView:
    requested_ms = first.at_ms if first is not None else None
    actor = first.actor if first is not None else ""
    match recorded.event:
        case OperationSucceeded() as e:
            return shapes.OperationView(
                operation=e.operation, kind=e.kind, state="succeeded", model=e.model, instance=e.instance, actor=actor,
                requested_ms=requested_ms if requested_ms is not None else recorded.at_ms - e.took_ms,
                position=recorded.position, took_ms=e.took_ms, note=e.note,
            )  # fmt: skip
        case OperationFailed() as e:
            return shapes.OperationView(
                operation=e.operation, kind=e.kind, state="failed", model=e.model, instance=e.instance, actor=actor,
                requested_ms=requested_ms, position=recorded.position, code=e.code, message=e.message,
                took_ms=recorded.at_ms - requested_ms if requested_ms is not None else None,
            )  # fmt: skip
        case OperationRequested() as e:
            return shapes.OperationView(
                operation=e.operation, kind=e.kind, state="open", model=e.model, instance=e.instance, actor=recorded.actor,
                requested_ms=recorded.at_ms, position=recorded.position,
            )  # fmt: skip
        case other:
            raise AssertionError(f"{type(other).__name__} is no event of an operation")
