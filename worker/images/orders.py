"""What an operator asks of a node's images, over the bus: is this one whole, which are over the quota. It changes nothing."""

import asyncio

import msgspec
from nats.aio.msg import Msg

from controlplane.quantities import human_bytes
from controlplane.subjects import ImageAsk, ImageDone
from worker.images.cabinet import Cabinet
from worker.images.manifest import ImageBroken


async def answer_about_images(cabinet: Cabinet, message: Msg) -> None:
    """Do it, and answer; what comes of it is told to the plane by the cabinet."""
    try:
        done = await asyncio.to_thread(carry_out, cabinet, msgspec.json.decode(message.data, type=ImageAsk))
    except (msgspec.MsgspecError, OSError) as error:
        done = ImageDone(code="invalid", message=str(error))
    await message.respond(msgspec.json.encode(done))


def carry_out(cabinet: Cabinet, ask: ImageAsk) -> ImageDone:
    """Blocks: a check reads the whole image."""
    if ask.verb == "surplus":
        return ImageDone(images=tuple(cabinet.budget.surplus()))
    if not ask.image.startswith("img_") or not ask.image.isidentifier():
        return ImageDone(code="invalid", message=f"{ask.image[:100]!r} is no image's id")
    try:
        manifest = cabinet.verify(ask.image)
    except ImageBroken as broken:
        return ImageDone(images=(ask.image,), code=broken.code, message=broken.message)
    return ImageDone(
        images=(manifest.image,), message=f"{len(manifest.files)} files, {human_bytes(manifest.size_bytes)}: as written"
    )
