"""What events mean for the images on the nodes' disks."""

from msgspec.structs import replace

from controlplane.events import ImageBuilt, ImageFailed, ImageRefused, ImageRemoved
from controlplane.fleet.members import Image
from controlplane.fleet.state import Fleet


def built(fleet: Fleet, e: ImageBuilt, at: int) -> Fleet:
    image = Image(
        image=e.image, node=e.node, configuration=e.configuration, size_bytes=e.size_bytes, made_ms=at, proof=e.proof
    )  # fmt: skip
    return replace(fleet, images=fleet.images.set(e.image, image))


def judged(fleet: Fleet, e: ImageRefused | ImageFailed) -> Fleet:
    """Not to be used; one that was never finished is known from here on, so that people see it."""
    known = fleet.images.get(e.image) or Image(image=e.image, node=e.node, configuration=e.configuration)
    state = "failed" if isinstance(e, ImageFailed) else "refused"
    return replace(fleet, images=fleet.images.set(e.image, replace(known, state=state, code=e.code, message=e.message)))


def removed(fleet: Fleet, e: ImageRemoved) -> Fleet:
    return replace(fleet, images=fleet.images.delete(e.image)) if e.image in fleet.images else fleet


def used(fleet: Fleet, image: str | None, at: int) -> Fleet:
    """An instance has come up from it."""
    known = fleet.images.get(image or "")
    if known is None:
        return fleet
    return replace(fleet, images=fleet.images.set(known.image, replace(known, used_ms=at, uses=known.uses + 1)))
