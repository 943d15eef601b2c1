"""Lists and single members of the fleet, from the view; `?after=<position>` waits until the view holds that event.

`?at=<moment>` has them as they were then, folded from the log.
"""

from collections.abc import Iterable
from typing import Annotated, TypeVar

from litestar import get
from litestar.openapi.spec import Example
from litestar.params import FromPath, QueryParameter

from controlplane.past import Moment
from web.errors import ApiError
from web.rest import portray, shapes
from web.rest.asking import Ask, moment_of, services_of, sight

T = TypeVar("T")
Position = Annotated[int | None, QueryParameter(ge=0, le=2**62, description="Wait until the view holds this event")]

At = Annotated[
    str | None,
    QueryParameter(
        max_length=100, examples=[Example(value="4711"), Example(value="2026-11-29T13:20:01Z")],
        description="As it was then: after the event at this position of the log, or after the last one at or before this time "
        "(ISO 8601, UTC); what only beats know is null. Not with 'after'",
    ),
]  # fmt: skip


@get("/past", summary="Which moment of the past is meant", description="Without 'at': the newest.")
async def past(request: Ask, at: At = None) -> Moment:
    return await moment_of(services_of(request), at)


@get("/nodes")
async def nodes(request: Ask, after: Position = None, at: At = None) -> list[shapes.NodeView]:
    return portray.nodes(*await sight(request, after, at))


@get("/nodes/{name:str}")
async def node(request: Ask, name: FromPath[str], after: Position = None, at: At = None) -> shapes.NodeView:
    known = portray.nodes(*await sight(request, after, at))
    return _one((n for n in known if n.node == name), "node", name)


@get("/devices")
async def devices(request: Ask, after: Position = None, at: At = None) -> list[shapes.DeviceView]:
    return portray.devices(*await sight(request, after, at))


@get("/devices/{name:str}", description="By UUID or by name.")
async def device(request: Ask, name: FromPath[str], after: Position = None, at: At = None) -> shapes.DeviceView:
    known = portray.devices(*await sight(request, after, at))
    return _one((d for d in known if name in (d.device, d.name)), "device", name)


@get("/models")
async def models(request: Ask, after: Position = None, at: At = None) -> list[shapes.ModelView]:
    return portray.models(*await sight(request, after, at))


@get("/models/{name:str}", description="By name or alias.")
async def model(request: Ask, name: FromPath[str], after: Position = None, at: At = None) -> shapes.ModelView:
    fleet, beats = await sight(request, after, at)
    known = fleet.resolve(name)
    if known is None:
        raise _unknown("model", name)
    return portray.model(fleet, beats, known)


@get("/instances")
async def instances(request: Ask, after: Position = None, at: At = None) -> list[shapes.InstanceView]:
    return portray.instances(*await sight(request, after, at))


@get("/instances/{name:str}")
async def instance(request: Ask, name: FromPath[str], after: Position = None, at: At = None) -> shapes.InstanceView:
    known = portray.instances(*await sight(request, after, at))
    return _one((i for i in known if i.instance == name), "instance", name)


@get("/weights")
async def weights(request: Ask, after: Position = None, at: At = None) -> list[shapes.WeightsView]:
    return portray.weights((await sight(request, after, at))[0])


def _one(found: Iterable[T], kind: str, name: str) -> T:
    for it in found:
        return it
    raise _unknown(kind, name)


def _unknown(kind: str, name: str) -> ApiError:
    return ApiError(404, f"{kind}_unknown", f"there is no {kind} {name[:100]!r}", details={kind: name[:100]})
