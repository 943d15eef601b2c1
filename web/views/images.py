"""Skeletons on the nodes' disks: whom they serve, how they stand, and what becomes of those that can't be used."""

import msgspec

from controlplane.fleet import ANEW, DISK_FULL, REBUILD, Fleet, Image, Instance
from controlplane.fleet.images import is_pinned, models_of, settings_pin, unsaved
from controlplane.rungs import Rung
from web.views.figures import size
from web.views.hues import hues


class ImageView(msgspec.Struct, frozen=True, kw_only=True):
    """A skeleton on a node's disk."""

    image: str
    models: tuple[str, ...]
    hue: int
    size_bytes: int
    made_ms: int
    used_ms: int
    uses: int
    state: str
    reason: str
    outlook: str
    """What becomes of it, where that is not plain."""
    saved: int
    """Instances that have no process and come back from it."""
    pinned: bool
    actions: tuple[str, ...] = ()
    """Verbs of the buttons that can do something now."""
    parting: str = ""
    """What is asked before it is removed."""


def images(fleet: Fleet, node: str) -> tuple[ImageView, ...]:
    """Those of one node, the last used first."""
    tints = hues(fleet)
    there = sorted((i for i in fleet.images.values() if i.node == node), key=lambda i: (-i.used_ms, i.image))
    return tuple(
        ImageView(
            image=image.image, models=models_of(fleet, image.configuration), hue=tints.get(image.configuration, 0),
            size_bytes=image.size_bytes, made_ms=image.made_ms, used_ms=image.used_ms, uses=image.uses, state=state(image),
            reason=f"{image.code}: {image.message}" if image.code else "", outlook=outlook(fleet, image),
            saved=sum(i.image == image.image and i.rung is Rung.SAVED for i in fleet.instances.values()),
            pinned=is_pinned(fleet, image), actions=actions(fleet, image), parting=parting(fleet, image),
        )
        for image in there
    )  # fmt: skip


def off_disk(fleet: Fleet, instance: Instance) -> str:
    """Why an instance is not on disk, where it was to go, and what comes of that; empty: it was not, or is."""
    why = unsaved(fleet, instance)
    if why is None or instance.rung not in (Rung.SLEEP, Rung.CHECKPOINT):
        return ""
    model, outlook = fleet.models.get(instance.model or ""), ""
    if why.room:
        outlook = "; there is room by now"
    elif why.code in DISK_FULL and model is not None and model.spec.idle.saved_ms is not None:
        outlook = "; it is tried again once there is room"
    return f"not on disk ({why.code}): {why.message}{outlook}"


def all_off_disk(fleet: Fleet, node: str) -> tuple[str, ...]:
    """A sentence for each instance of the node that is not on disk, where it was to go."""
    there = sorted((i for i in fleet.instances.values() if i.node == node), key=lambda i: i.instance)
    return tuple(f"{i.instance} ({i.model or 'no model'}) is {why}" for i in there if (why := off_disk(fleet, i)))


def actions(fleet: Fleet, image: Image) -> tuple[str, ...]:
    """What an operator can do about it now, so that something comes of it."""
    if image.leaving:
        return ()
    node = fleet.nodes.get(image.node)
    verify = image.state == "ok" and node is not None and node.heard
    pin = "unpin" if image.pinned else "" if is_pinned(fleet, image) else "pin"  # the settings' pins are the settings' affair
    wanted = ("verify" if verify else "", "rebuild" if image.state != "refused" else "", pin, "remove")
    return tuple(verb for verb in wanted if verb)


def stays(fleet: Fleet, image: Image) -> str:
    """Why an image that an operator lets go stays all the same; empty: it does not."""
    name = settings_pin(fleet, image)
    return f'{image.image} stays: the settings pin "{name}"; take it out of [images] pin to let it go' if name else ""


def parting(fleet: Fleet, image: Image) -> str:
    """The question before it is removed, with what that costs."""
    saved = sum(i.image == image.image and i.rung is Rung.SAVED for i in fleet.instances.values())
    cost = f" {saved} saved instance{'' if saved == 1 else 's'} will start cold." if saved else ""
    return f"Remove image {image.image} ({size(image.size_bytes)})?{cost}"


def state(image: Image) -> str:
    """`ok`, `stale` (it can't be used any more), `failed` or `leaving`."""
    if image.leaving:
        return "leaving"
    return "stale" if image.state == "refused" else image.state


def outlook(fleet: Fleet, image: Image) -> str:
    """A sentence on what comes next; empty for an image that may be used."""
    if image.leaving:
        return "its node is about to remove it"
    if image.state == "failed":
        return f"left alone until an operator acts: enginehouse images rebuild {image.image}"
    if image.state != "refused":
        return ""
    mates = [i for i in fleet.instances.values() if (i.node, i.configuration) == (image.node, image.configuration)]
    kin = [i for i in fleet.images.values() if (i.node, i.configuration) == (image.node, image.configuration)]
    if any(i.directive is not None and i.directive.code == REBUILD and not i.directive_settled for i in mates):
        return "a new one is being built"
    if any(i.state == "ok" for i in kin):
        return "a new one is there"
    if any(i.state == "failed" for i in kin):
        return "a new one has failed: see that one"
    asked = "asked for anew" if image.code == ANEW else "built anew"
    if any(i.rung is Rung.SLEEP for i in mates):
        return f"{asked}: begins as soon as nobody waits and its place is free"
    return f"{asked} in the background once its skeleton sleeps, or when a model of it is saved"
