"""Skeletons on the nodes' disks: listed from the view; what is done to one is done by its node, and told by events."""

from typing import Annotated, Any, Final

import msgspec
import nats.errors
from litestar import Request, delete, get, post
from litestar.params import FromPath, HeaderParameter

from controlplane.fleet import Fleet, Image
from controlplane.subjects import ImageAsk, ImageDone, images_of
from web.errors import ApiError
from web.rest.asking import fleet_after, services_of
from web.rest.fleet import Position

Ask = Request[Any, Any, Any]
Key = Annotated[str | None, HeaderParameter(name="Idempotency-Key", max_length=255, description="Makes a repeat harmless")]
NODE_S: Final = 60.0
"""A check reads a whole image, some GiB at most."""


class ImageView(msgspec.Struct, frozen=True, kw_only=True):
    image: str
    node: str
    configuration: str
    models: list[str]
    """Those of its configuration: each can be mapped into the skeleton."""
    state: str
    """`ok`; `refused`: something that it depends on has changed, it is built anew; `failed`: an operator must act."""
    size_bytes: int
    made_ms: int
    used_ms: int
    uses: int
    saved: list[str]
    """Instances that have no process and come back from it."""
    code: str
    message: str
    proof: str


@get("/images")
async def images(request: Ask, after: Position = None) -> list[ImageView]:
    fleet = await fleet_after(services_of(request), after)
    return [_shown(fleet, known) for known in sorted(fleet.images.values(), key=lambda known: (known.node, known.image))]


@get("/images/{name:str}")
async def image(request: Ask, name: FromPath[str], after: Position = None) -> ImageView:
    fleet = await fleet_after(services_of(request), after)
    return _shown(fleet, _known(fleet, name))


@post("/images/{name:str}/verify", status_code=200, summary="Compare an image with its digests and with today's machine")
async def verify_image(request: Ask, name: FromPath[str]) -> ImageDone:
    return await _one(request, name, "verify")


@post("/images/{name:str}/rebuild", status_code=200, summary="Forget an image and its failure: the next save makes it anew")
async def rebuild_image(request: Ask, name: FromPath[str], key: Key = None) -> ImageDone:
    return await _one(request, name, "rm")


@delete("/images/{name:str}", status_code=200, summary="Remove an image; saved instances of it start cold")
async def remove_image(request: Ask, name: FromPath[str], key: Key = None) -> ImageDone:
    return await _one(request, name, "rm")


@post("/images/gc", status_code=200, summary="Remove what is over the nodes' quotas, least valuable first")
async def collect_images(request: Ask, key: Key = None) -> ImageDone:
    fleet = await fleet_after(services_of(request), None)
    gone: list[str] = []
    for node in sorted(node.node for node in fleet.nodes.values() if node.heard):
        gone += (await _ask(request, node, ImageAsk(verb="gc"))).images
    return ImageDone(images=tuple(gone))


async def _one(request: Ask, name: str, verb: str) -> ImageDone:
    known = _known(await fleet_after(services_of(request), None), name)
    return await _ask(request, known.node, ImageAsk(verb=verb, image=known.image))


async def _ask(request: Ask, node: str, ask: ImageAsk) -> ImageDone:
    try:
        reply = await services_of(request).bus.nc.request(images_of(node), msgspec.json.encode(ask), timeout=NODE_S)
    except (nats.errors.Error, TimeoutError, OSError) as error:
        message = f"node {node} does not answer: {error or type(error).__name__}"
        raise ApiError(503, "unavailable", message, retry_after_ms=1000) from error
    done = msgspec.json.decode(reply.data, type=ImageDone)
    if done.code:
        raise ApiError(409, done.code, done.message, details={"image": ask.image})
    return done


def _known(fleet: Fleet, name: str) -> Image:
    known = fleet.images.get(name)
    if known is None:
        raise ApiError(404, "image_unknown", f"there is no image {name[:100]!r}", details={"image": name[:100]})
    return known


def _shown(fleet: Fleet, known: Image) -> ImageView:
    models = [m for m in fleet.models.values() if m.facts and m.facts.configuration == known.configuration and not m.retired]
    saved = [i.instance for i in fleet.instances.values() if i.image == known.image and i.rung == "saved"]
    return ImageView(
        image=known.image, node=known.node, configuration=known.configuration, models=sorted(m.model for m in models),
        state=known.state, size_bytes=known.size_bytes, made_ms=known.made_ms, used_ms=known.used_ms, uses=known.uses,
        saved=sorted(saved), code=known.code, message=known.message, proof=known.proof,
    )  # fmt: skip
