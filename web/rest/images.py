"""Skeletons on the nodes' disks: listed from the view; what is done to one is done by its node, and told by events."""

from typing import Final

import msgspec
from litestar import delete, get, post
from litestar.params import FromPath

from controlplane.commands import PinImage, RebuildImage, RemoveImage
from controlplane.fleet import Fleet, Image
from controlplane.fleet.images import is_pinned, models_of
from controlplane.refusal import Code, Refused
from controlplane.subjects import ImageAsk, ImageDone
from web.errors import ApiError
from web.nodes import Nodes
from web.rest.asking import Ask, Key, command, fleet_after, services_of, sight
from web.rest.fleet import At, Position
from web.views.images import outlook, state, stays

REMOVED_S: Final = 10.0
"""From the word to a worker's removal lie milliseconds, unless it is away."""


class ImageView(msgspec.Struct, frozen=True, kw_only=True):
    image: str
    node: str
    configuration: str
    models: list[str]
    """Those of its configuration: each can be mapped into the skeleton."""
    state: str
    """`ok`; `stale`: something that it depends on has changed, it is built anew; `failed`: an operator must act; `leaving`."""
    outlook: str
    """What becomes of it, where that is not plain."""
    pinned: bool
    """By an operator, or by the node's settings: it stays whatever the quota says."""
    size_bytes: int
    """Of the disk."""
    zero_bytes: int
    """Of memory that is all zeros, and is on no disk."""
    made_ms: int
    used_ms: int
    uses: int
    saved: list[str]
    """Instances that have no process and come back from it."""
    code: str
    message: str
    proof: str


@get("/images")
async def images(request: Ask, after: Position = None, at: At = None) -> list[ImageView]:
    fleet, _ = await sight(request, after, at)
    return [_shown(fleet, known) for known in sorted(fleet.images.values(), key=lambda known: (known.node, known.image))]


@get("/images/{name:str}")
async def image(request: Ask, name: FromPath[str], after: Position = None, at: At = None) -> ImageView:
    fleet, _ = await sight(request, after, at)
    return _shown(fleet, _known(fleet, name))


@post("/images/{name:str}/verify", status_code=200, summary="Compare an image with its digests and with today's machine")
async def verify_image(request: Ask, name: FromPath[str]) -> ImageDone:
    return await _one(request, name, "verify")


@post("/images/{name:str}/rebuild", status_code=200, summary="Never use it again; a new one is made when that disturbs nobody")
async def rebuild_image(request: Ask, name: FromPath[str], key: Key = None) -> ImageDone:
    fleet = await _told(request, RebuildImage(image=name))
    known = fleet.images.get(name)
    return ImageDone(images=(name,), message=outlook(fleet, known) if known is not None else "")


@post("/images/{name:str}/pin", status_code=200, summary="Keep an image whatever the quota says")
async def pin_image(request: Ask, name: FromPath[str], key: Key = None) -> ImageDone:
    await _told(request, PinImage(image=name))
    return ImageDone(images=(name,))


@delete("/images/{name:str}/pin", status_code=200, summary="Let an image go again when room is needed")
async def unpin_image(request: Ask, name: FromPath[str], key: Key = None) -> ImageDone:
    fleet = await _told(request, PinImage(image=name, pinned=False))
    known = fleet.images.get(name)
    return ImageDone(images=(name,), message=stays(fleet, known) if known is not None else "")


@delete("/images/{name:str}", status_code=200, summary="Remove an image; saved instances of it start cold")
async def remove_image(request: Ask, name: FromPath[str], key: Key = None) -> ImageDone:
    await _told(request, RemoveImage(image=name))
    return await _gone(request, (name,))


@post("/images/gc", status_code=200, summary="Remove what is over the nodes' quotas, least valuable first")
async def collect_images(request: Ask, key: Key = None) -> ImageDone:
    fleet = await fleet_after(services_of(request), None)
    names: list[str] = []
    for node in sorted(node.node for node in fleet.nodes.values() if node.heard):
        names += (await _ask(request, node, ImageAsk(verb="surplus"))).images
    gone = [name for name in names if await _removes(request, name)]
    return await _gone(request, tuple(gone))


async def _removes(request: Ask, name: str) -> bool:
    """False: since its node was asked it has gone, or somebody has pinned it."""
    try:
        await command(request, RemoveImage(image=name, code="quota"))
    except Refused as refused:
        if refused.code in (Code.IMAGE_UNKNOWN, Code.NOT_AVAILABLE):
            return False
        raise
    return True


async def _one(request: Ask, name: str, verb: str) -> ImageDone:
    known = _known(await fleet_after(services_of(request), None), name)
    return await _ask(request, known.node, ImageAsk(verb=verb, image=known.image))


async def _told(request: Ask, body: RebuildImage | RemoveImage | PinImage) -> Fleet:
    """The decider's word, and the fleet that knows of it."""
    answer = await command(request, body)
    return await fleet_after(services_of(request), answer.position or None)


async def _gone(request: Ask, names: tuple[str, ...]) -> ImageDone:
    """Wait until their nodes have removed them; one that is away does so when it is back, and the answer says so."""
    view = services_of(request).view
    try:
        await view.wait_for(lambda fleet: not any(name in fleet.images for name in names), REMOVED_S)
    except TimeoutError:
        left = ", ".join(name for name in names if name in view.fleet.images)
        return ImageDone(images=names, message=f"{left}: the node has not removed it yet; it does as soon as it can")
    return ImageDone(images=names)


async def _ask(request: Ask, node: str, ask: ImageAsk) -> ImageDone:
    done = await Nodes(services_of(request).bus).ask(node, ask)
    if done.code:
        raise ApiError(409, done.code, done.message, details={"image": ask.image})
    return done


def _known(fleet: Fleet, name: str) -> Image:
    known = fleet.images.get(name)
    if known is None:
        raise ApiError(404, "image_unknown", f"there is no image {name[:100]!r}", details={"image": name[:100]})
    return known


def _shown(fleet: Fleet, known: Image) -> ImageView:
    saved = [i.instance for i in fleet.instances.values() if i.image == known.image and i.rung == "saved"]
    return ImageView(
        image=known.image, node=known.node, configuration=known.configuration,
        models=list(models_of(fleet, known.configuration)), state=state(known), outlook=outlook(fleet, known),
        pinned=is_pinned(fleet, known), size_bytes=known.size_bytes, zero_bytes=known.zero_bytes, made_ms=known.made_ms,
        used_ms=known.used_ms, uses=known.uses, saved=sorted(saved), code=known.code, message=known.message,
        proof=known.proof,
    )  # fmt: skip
