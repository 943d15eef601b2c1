"""What events mean for the images on the nodes' disks."""

from collections.abc import Iterable
from difflib import get_close_matches

from msgspec.structs import replace

from controlplane.events import ImageBuilt, ImageDismissed, ImageFailed, ImagePinned, ImageRefused, ImageRemoved
from controlplane.fleet.members import Image, Instance, Unsaved
from controlplane.fleet.state import Fleet


def built(fleet: Fleet, e: ImageBuilt, at: int) -> Fleet:
    """A newer one of a configuration is pinned if an older one was."""
    kin = [i for i in fleet.images.values() if (i.node, i.configuration) == (e.node, e.configuration)]
    image = Image(
        image=e.image, node=e.node, configuration=e.configuration, size_bytes=e.size_bytes, zero_bytes=e.zero_bytes,
        made_ms=at, proof=e.proof, pinned=any(i.pinned for i in kin),
    )  # fmt: skip
    return replace(fleet, images=fleet.images.set(e.image, image))


def judged(fleet: Fleet, e: ImageRefused | ImageFailed) -> Fleet:
    """Not to be used; one that was never finished is known from here on, so that people see it."""
    known = fleet.images.get(e.image) or Image(image=e.image, node=e.node, configuration=e.configuration)
    state = "failed" if isinstance(e, ImageFailed) else "refused"
    return replace(fleet, images=fleet.images.set(e.image, replace(known, state=state, code=e.code, message=e.message)))


def dismissed(fleet: Fleet, e: ImageDismissed, actor: str) -> Fleet:
    return _changed(fleet, e.image, leaving=actor)


def pinned(fleet: Fleet, e: ImagePinned) -> Fleet:
    return _changed(fleet, e.image, pinned=e.pinned)


def removed(fleet: Fleet, e: ImageRemoved) -> Fleet:
    return replace(fleet, images=fleet.images.delete(e.image)) if e.image in fleet.images else fleet


def used(fleet: Fleet, image: str | None, at: int) -> Fleet:
    """An instance has come up from it."""
    known = fleet.images.get(image or "")
    return _changed(fleet, known.image, used_ms=at, uses=known.uses + 1) if known is not None else fleet


def models_of(fleet: Fleet, configuration: str) -> tuple[str, ...]:
    """Names of the models whose weights can be mapped into a skeleton of that configuration, retired ones apart."""
    fit = (m for m in fleet.models.values() if m.facts and m.facts.configuration == configuration and not m.retired)
    return tuple(sorted(m.model for m in fit))


def is_pinned(fleet: Fleet, image: Image) -> bool:
    """Whether it stays whatever the quota says: by an operator's word, or by its node's settings."""
    return image.pinned or settings_pin(fleet, image) is not None


def settings_pin(fleet: Fleet, image: Image) -> str | None:
    """The name, of a model or its configuration, by which its node's settings pin it; None: they don't."""
    node = fleet.nodes.get(image.node)
    theirs = {image.configuration, *models_of(fleet, image.configuration)}
    return next((name for name in node.image_pins if name in theirs), None) if node is not None else None


def unsaved(fleet: Fleet, instance: Instance) -> Unsaved | None:
    """Why it is not on disk, where it was to go; None: it was not, or has no image to write, for there is a good one by now."""
    kin = (i for i in fleet.images.values() if (i.node, i.configuration) == (instance.node, instance.configuration))
    return instance.unsaved if instance.unsaved is not None and not any(i.state == "ok" for i in kin) else None


def idle_pins(fleet: Fleet, named: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each of a settings file's pins that pins nothing, for want of a model or a configuration of that name."""
    models = {m.model for m in fleet.models.values() if not m.retired}
    names = sorted({*models, *fleet.configurations})
    return tuple(_idle(fleet, name, names) for name in named if name not in names)


def _idle(fleet: Fleet, name: str, names: list[str]) -> str:
    alias = fleet.resolve(name)
    if alias is not None and not alias.retired:
        return f'[images] pin: "{name}" is an alias, and pins nothing: write "{alias.model}"'
    near = get_close_matches(name, names, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f'[images] pin: no model and no configuration is called "{name}", so it pins nothing until one is{hint}'


def _changed(fleet: Fleet, image: str, **changes: object) -> Fleet:
    known = fleet.images.get(image)
    return fleet if known is None else replace(fleet, images=fleet.images.set(image, replace(known, **changes)))
