"""Lists and single members of the fleet, from the view; `?after=<position>` waits until the view holds that event."""

from collections.abc import Iterable
from typing import Annotated, TypeVar

from litestar import get
from litestar.params import FromPath, QueryParameter

from web.errors import ApiError
from web.rest import portray, shapes
from web.rest.asking import Ask, fleet_after, services_of, sight

T = TypeVar("T")
Position = Annotated[int | None, QueryParameter(ge=0, le=2**62, description="Wait until the view holds this event")]


@get("/nodes")
async def nodes(request: Ask, after: Position = None) -> list[shapes.NodeView]:
    return portray.nodes(*await sight(request, after))


@get("/nodes/{name:str}")
async def node(request: Ask, name: FromPath[str], after: Position = None) -> shapes.NodeView:
    known = portray.nodes(*await sight(request, after))
    return _one((n for n in known if n.node == name), "node", name)


@get("/devices")
async def devices(request: Ask, after: Position = None) -> list[shapes.DeviceView]:
    return portray.devices(*await sight(request, after))


@get("/devices/{name:str}", description="By UUID or by name.")
async def device(request: Ask, name: FromPath[str], after: Position = None) -> shapes.DeviceView:
    known = portray.devices(*await sight(request, after))
    return _one((d for d in known if name in (d.device, d.name)), "device", name)


@get("/models")
async def models(request: Ask, after: Position = None) -> list[shapes.ModelView]:
    return portray.models(*await sight(request, after))


@get("/models/{name:str}", description="By name or alias.")
async def model(request: Ask, name: FromPath[str], after: Position = None) -> shapes.ModelView:
    fleet, beats = await sight(request, after)
    known = fleet.resolve(name)
    if known is None:
        raise _unknown("model", name)
    return portray.model(fleet, beats, known)


@get("/instances")
async def instances(request: Ask, after: Position = None) -> list[shapes.InstanceView]:
    return portray.instances(*await sight(request, after))


@get("/instances/{name:str}")
async def instance(request: Ask, name: FromPath[str], after: Position = None) -> shapes.InstanceView:
    known = portray.instances(*await sight(request, after))
    return _one((i for i in known if i.instance == name), "instance", name)


@get("/weights")
async def weights(request: Ask, after: Position = None) -> list[shapes.WeightsView]:
    return portray.weights(await fleet_after(services_of(request), after))


def _one(found: Iterable[T], kind: str, name: str) -> T:
    for it in found:
        return it
    raise _unknown(kind, name)


def _unknown(kind: str, name: str) -> ApiError:
    return ApiError(404, f"{kind}_unknown", f"there is no {kind} {name[:100]!r}", details={kind: name[:100]})
