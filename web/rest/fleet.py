"""Lists and single members of the fleet, from the view; `?after=<position>` waits until the view holds that event."""

from collections.abc import Iterable
from typing import Annotated, TypeVar

from litestar import get
from litestar.params import FromPath, QueryParameter

from web.errors import ApiError
from web.rest import portray, shapes
from web.rest.asking import Ask, fleet_after, services_of

T = TypeVar("T")
Position = Annotated[int | None, QueryParameter(ge=0, le=2**62, description="Wait until the view holds this event")]


@get("/nodes")
async def nodes(request: Ask, after: Position = None) -> list[shapes.NodeView]:
    services = services_of(request)
    return portray.nodes(await fleet_after(services, after), services.view.beats)


@get("/nodes/{name:str}")
async def node(request: Ask, name: FromPath[str], after: Position = None) -> shapes.NodeView:
    services = services_of(request)
    fleet = await fleet_after(services, after)
    return _one((n for n in portray.nodes(fleet, services.view.beats) if n.node == name), "node", name)


@get("/devices")
async def devices(request: Ask, after: Position = None) -> list[shapes.DeviceView]:
    services = services_of(request)
    return portray.devices(await fleet_after(services, after), services.view.beats)


@get("/devices/{name:str}", description="By UUID or by name.")
async def device(request: Ask, name: FromPath[str], after: Position = None) -> shapes.DeviceView:
    services = services_of(request)
    fleet = await fleet_after(services, after)
    return _one((d for d in portray.devices(fleet, services.view.beats) if name in (d.device, d.name)), "device", name)


@get("/models")
async def models(request: Ask, after: Position = None) -> list[shapes.ModelView]:
    services = services_of(request)
    return portray.models(await fleet_after(services, after), services.view.beats)


@get("/models/{name:str}", description="By name or alias.")
async def model(request: Ask, name: FromPath[str], after: Position = None) -> shapes.ModelView:
    services = services_of(request)
    fleet = await fleet_after(services, after)
    known = fleet.resolve(name)
    if known is None:
        raise _unknown("model", name)
    return portray.model(fleet, services.view.beats, known)


@get("/instances")
async def instances(request: Ask, after: Position = None) -> list[shapes.InstanceView]:
    services = services_of(request)
    return portray.instances(await fleet_after(services, after), services.view.beats)


@get("/instances/{name:str}")
async def instance(request: Ask, name: FromPath[str], after: Position = None) -> shapes.InstanceView:
    services = services_of(request)
    fleet = await fleet_after(services, after)
    return _one((i for i in portray.instances(fleet, services.view.beats) if i.instance == name), "instance", name)


@get("/weights")
async def weights(request: Ask, after: Position = None) -> list[shapes.WeightsView]:
    return portray.weights(await fleet_after(services_of(request), after))


def _one(found: Iterable[T], kind: str, name: FromPath[str]) -> T:
    for it in found:
        return it
    raise _unknown(kind, name)


def _unknown(kind: str, name: FromPath[str]) -> ApiError:
    return ApiError(404, f"{kind}_unknown", f"there is no {kind} {name[:100]!r}", details={kind: name[:100]})
