"""What REST routes have in common: who asks, the view as new as asked for, the decider's answers as 202."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, Response
from litestar.params import HeaderParameter

from controlplane.answer import Answer, Done, Opened
from controlplane.commands import AnyCommand
from controlplane.fleet import Fleet
from controlplane.moments import when
from controlplane.past import Moment
from controlplane.subjects import NodeBeat
from web.auth import identity_of
from web.errors import ApiError
from web.services import Services

Ask = Request[Any, Any, Any]
Key = Annotated[str | None, HeaderParameter(name="Idempotency-Key", max_length=255, description="Makes a repeat harmless")]
"""Declared by every route that changes something; `command` reads it."""

AFTER_S: Final = 5.0
"""A view that isn't there after this long is cut off; 504 says so."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A command was carried out; reads with `?after=<position>` show its effect. 0: nothing had to change."""

    position: int
    message: str = ""
    """What is to be known of it, and done; mostly nothing."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """An operation is under way."""

    operation: str
    position: int


def services_of(request: Ask) -> Services:
    services: Services = request.app.state.services
    return services


async def fleet_after(services: Services, after: int | None) -> Fleet:
    """The fleet, holding event `after` at least. Raises ApiError: 503 when nothing is known yet, 504 when it takes too long."""
    view = services.view
    if view.fleet.position == 0 and not view.synced:
        message = "the plane's state is not known yet: the decider has not answered"
        raise ApiError(503, "unavailable", message, retry_after_ms=1000)
    if after is None:
        return view.fleet
    try:
        return await view.wait_position(after, AFTER_S)
    except TimeoutError:
        message = f"the view is at position {view.fleet.position} and did not reach {after} within {AFTER_S:.0f} s"
        raise ApiError(504, "behind", message, details={"position": view.fleet.position, "after": after}) from None


async def sight(request: Ask, after: int | None, at: str | None) -> tuple[Fleet, Mapping[str, NodeBeat]]:
    """The fleet as `fleet_after`, and the nodes' last beats; or the fleet as it was `at` a moment, of which no beat is left.

    Raises ApiError, Refused.
    """
    services = services_of(request)
    if at is None:
        return await fleet_after(services, after), services.view.beats
    if after is not None:
        message = "'after' waits for the newest state, and 'at' asks for a past one: send one of them"
        raise ApiError(400, "invalid", message, param="at")
    return await services.past.fleet(await moment_of(services, at)), {}


async def moment_of(services: Services, at: str | None) -> Moment:
    """The moment that is meant; None: the newest. Raises ApiError, Refused."""
    try:
        return await services.past.moment(None if at is None else when(at))
    except ValueError as error:
        raise ApiError(400, "invalid", str(error), param="at") from error


async def command(request: Ask, body: AnyCommand) -> Answer:
    """Send an operator's command, idempotent by the caller's key. Raises Refused."""
    key = request.headers.get("idempotency-key")
    return await services_of(request).operator.command(body, identity_of(request.scope).actor, key=key)


def answered(answer: Answer) -> Response[Changed | Accepted]:
    """202: with the operation and where to follow it, or with the position of what was done."""
    if isinstance(answer, Opened):
        location = f"/api/operations/{answer.operation}?after={answer.position}"
        return Response(
            Accepted(operation=answer.operation, position=answer.position), status_code=202, headers={"location": location}
        )
    message = answer.note if isinstance(answer, Done) else ""
    return Response(Changed(position=answer.position, message=message), status_code=202)
