"""Skeletons on disk: what nodes report of their images, and when an instance may be sent there."""

from collections.abc import Iterator

import msgspec

from controlplane.commands import (
    PinImage,
    RebuildImage,
    RemoveImage,
    ReportImageBuilt,
    ReportImageFailed,
    ReportImageRefused,
    ReportImageRemoved,
    ReportImageRoom,
)  # fmt: skip
from controlplane.decisions import descent, standing
from controlplane.decisions.draft import Draft
from controlplane.decisions.limits import RENEW_AGAIN_MS
from controlplane.decisions.needs import cells, device_bytes, held_bytes, on
from controlplane.decisions.placement import place
from controlplane.decisions.verdict import loads
from controlplane.events import (
    GrantGiven,
    ImageBuilt,
    ImageDismissed,
    ImageFailed,
    ImagePinned,
    ImageRefused,
    ImageRemoved,
    ImageRoomFound,
    InstanceDirected,
)
from controlplane.fleet.callers import Operation
from controlplane.fleet.images import is_pinned, unsaved
from controlplane.fleet.members import ANEW, DISK_FULL, ENGINE_OUTDATED, REBUILD, Image, Instance, Model
from controlplane.fleet.state import Fleet
from controlplane.quantities import need_and_limit
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung


def built(draft: Draft, report: ReportImageBuilt) -> None:
    known = draft.fleet.images.get(report.image)
    sizes = report.size_bytes, report.zero_bytes
    if known is None or known.state != "ok" or (known.size_bytes, known.zero_bytes) != sizes:
        draft.emit(ImageBuilt(**msgspec.structs.asdict(report)))


def refused(draft: Draft, report: ReportImageRefused) -> None:
    known = draft.fleet.images.get(report.image)
    if known is None or (known.state, known.code) != ("refused", report.code):
        draft.emit(ImageRefused(**msgspec.structs.asdict(report)))


def failed(draft: Draft, report: ReportImageFailed) -> None:
    known = draft.fleet.images.get(report.image)
    if known is None or (known.state, known.code) != ("failed", report.code):
        draft.emit(ImageFailed(**msgspec.structs.asdict(report)))


def removed(draft: Draft, report: ReportImageRemoved) -> None:
    if (known := draft.fleet.images.get(report.image)) is not None:
        draft.emit(ImageRemoved(node=report.node, image=report.image, code=report.code, by=known.leaving))


def room_found(draft: Draft, report: ReportImageRoom) -> None:
    """The next tick looks who may go to disk."""
    instance = draft.fleet.instances.get(report.instance)
    lacked = instance.unsaved if instance is not None and instance.node == report.node else None
    if lacked is not None and lacked.code in DISK_FULL and not lacked.room:
        draft.emit(ImageRoomFound(node=report.node, instance=report.instance))


def dismiss(draft: Draft, command: RemoveImage) -> None:
    """Name it to its node's worker, which removes it and says so. What only makes room spares the pinned."""
    image = _known(draft.fleet, command.image)
    if command.code == "quota" and is_pinned(draft.fleet, image):
        raise Refused(Code.NOT_AVAILABLE, f"{image.image} is pinned", image=image.image, reason="pinned")
    if not image.leaving:
        draft.emit(ImageDismissed(node=image.node, image=image.image, code=command.code))


def rebuild(draft: Draft, command: RebuildImage) -> None:
    """From here on it is stale: not used, its failures forgotten, and a new one is made when that disturbs nobody."""
    image = _known(draft.fleet, command.image)
    if (image.state, image.code) != ("refused", ANEW):
        draft.emit(
            ImageRefused(
                node=image.node, image=image.image, configuration=image.configuration, code=ANEW,
                message="a new one was asked for",
            )
        )  # fmt: skip


def pin(draft: Draft, command: PinImage) -> None:
    image = _known(draft.fleet, command.image)
    if image.pinned != command.pinned:
        draft.emit(ImagePinned(node=image.node, image=image.image, pinned=command.pinned))


def _known(fleet: Fleet, name: str) -> Image:
    image = fleet.images.get(name)
    if image is None:
        raise Refused(Code.IMAGE_UNKNOWN, f"there is no image {name[:100]!r}", image=name[:100])
    return image


def of(fleet: Fleet, instance: Instance) -> list[Image]:
    """All images of the instance's configuration on its node."""
    return [i for i in fleet.images.values() if (i.node, i.configuration) == (instance.node, instance.configuration)]


def hindrance(fleet: Fleet, instance: Instance) -> tuple[str, str] | None:
    """Why the instance can't go to disk, as code and sentence; None: it can."""
    node = fleet.nodes.get(instance.node)
    if node is not None and node.no_images:
        return "not_available", f"{instance.node} can't save engines: {node.no_images}"
    if instance.ranks:
        return "not_available", f"{instance.instance} is a gang of {len(instance.ranks)}: gangs are not saved to disk"
    known = of(fleet, instance)
    if not any(i.state == "ok" for i in known) and (broken := next((i for i in known if i.state == "failed"), None)):
        cure = f"`images rebuild {broken.image}` allows it again"
        return "image_failed", f"its image {broken.image} has failed ({broken.code}: {broken.message}); {cure}"
    if (why := unsaved(fleet, instance)) is not None and why.code == ENGINE_OUTDATED:
        return ENGINE_OUTDATED, why.message
    return None


def save(
    draft: Draft, instance: Instance, code: str, *, operation: str | None = None, because: int | None = None,
    victim_of: str | None = None,
) -> bool:  # fmt: skip
    """Direct it to disk, if that is possible now; False: it needs a place for the proof of a new image, and there is none.

    For an operation (an operator's) an idle holder of its device is sent to sleep, so that there will be.
    """
    fleet, grant = draft.fleet, instance.grant
    model = fleet.models.get(instance.model or "")
    if grant is None and not any(i.state == "ok" for i in of(fleet, instance)):
        if (given := _place(fleet, instance, model)) is None:
            if operation is not None:
                _ask_for_place(draft, instance, model, operation)
            return False
        grant = draft.emit(given, operation=operation).position
    draft.emit(
        InstanceDirected(
            node=instance.node, instance=instance.instance, rung=Rung.SAVED, grant=grant, code=code, model=instance.model,
            revision=instance.revision, need_bytes=_need(fleet, instance, model) if instance.grant is None and grant else 0,
            victim_of=victim_of,
        ),
        operation=operation, because=because,
    )  # fmt: skip
    return True


def _ask_for_place(draft: Draft, instance: Instance, model: Model | None, operation: str) -> None:
    """Send idle holders of its device to sleep: the least recently used first, one at a time, none while others wait, nor where
    memory that is not the plane's leaves no room even then."""
    fleet = draft.fleet
    device = fleet.devices.get(instance.device or "")
    if device is not None and _need(fleet, instance, model) > device.usable_bytes:
        return
    holders = [i for i in fleet.instances.values() if on(fleet, i, instance.device or "") and i.grant is not None]
    if fleet.waiting or any(standing.leaving(i) for i in holders):
        return
    idle = [i for i in holders if standing.evictable(fleet, i)]
    if idle:
        victim = min(idle, key=lambda i: (i.idle_since_ms, i.instance))
        descent.direct(draft, victim, Rung.SLEEP, "evicted", victim_of=instance.model, operation=operation)


def waits_for_place(fleet: Fleet, operation: Operation) -> str | None:
    """What an operator's save still waits for, with both numbers; None: it is under way."""
    waiting = [i for i in fleet.instances.values() if i.model == operation.model and i.rung in (Rung.SLEEP, Rung.CHECKPOINT)]
    if not waiting or any(i.directive is not None and i.directive.operation == operation.operation for i in waiting):
        return None
    model = fleet.models.get(operation.model or "")
    device = fleet.devices.get(waiting[0].device or "")
    needs, has = need_and_limit(_need(fleet, waiting[0], model), device.usable_bytes if device is not None else 0)
    return f"the proof of its image needs {needs} of {waiting[0].device} ({has}), and others held too much of it"


def renew(draft: Draft) -> None:
    """Have stale images made anew by their skeletons, where these sleep and nobody waits for anything: one at a time on a node.

    The sleeper is given its place for the proof, and goes on sleeping.
    """
    if draft.fleet.waiting or any(loads(draft.fleet)):
        return
    for image in sorted(draft.fleet.images.values(), key=lambda i: (not is_pinned(draft.fleet, i), -i.used_ms, i.image)):
        if image.state == "refused" and not _renewing(draft, image):
            _renew(draft, image)


def _renew(draft: Draft, image: Image) -> None:
    """By the first of its sleepers that has a place for it: another may sleep where there is none."""
    for sleeper in renewers(draft.fleet, image):
        if standing.fell_short(sleeper) and draft.now - sleeper.since_ms < RENEW_AGAIN_MS:
            continue
        model = draft.fleet.models.get(sleeper.model or "")
        if (given := _place(draft.fleet, sleeper, model)) is None:
            continue
        grant = draft.emit(given).position
        draft.emit(
            InstanceDirected(
                node=sleeper.node, instance=sleeper.instance, rung=Rung.SLEEP, grant=grant, code=REBUILD,
                model=sleeper.model, revision=sleeper.revision, need_bytes=_need(draft.fleet, sleeper, model),
            )
        )  # fmt: skip
        return


def renewers(fleet: Fleet, image: Image) -> Iterator[Instance]:
    """The sleepers that can make a stale image anew, if there is no good one already and none that has failed."""
    for instance in sorted(fleet.instances.values(), key=lambda i: i.instance):
        if instance.rung is not Rung.SLEEP or instance.node != image.node or instance.configuration != image.configuration:
            continue
        if not standing.idle(fleet, instance) or standing.obsolete(fleet, instance) or hindrance(fleet, instance) is not None:
            continue
        if not any(i.state == "ok" for i in of(fleet, instance)):
            yield instance


def _renewing(draft: Draft, image: Image) -> bool:
    others = (i for i in draft.fleet.instances.values() if i.node == image.node)
    return any(i.directive is not None and i.directive.code == REBUILD and not i.directive_settled for i in others)


def _need(fleet: Fleet, instance: Instance, model: Model | None) -> int:
    """Bytes of its device that the proof of a new image is promised."""
    device = fleet.devices.get(instance.device or "")
    return device_bytes(fleet, model, device) if device and model and model.facts else 0


def _place(fleet: Fleet, instance: Instance, model: Model | None) -> GrantGiven | None:
    """Cells where it sleeps, if they are free, nobody waits for them, and the bytes are there."""
    device = fleet.devices.get(instance.device or "")
    if device is None or model is None or model.facts is None or fleet.waiting:
        return None
    if (count := cells(fleet, model, device)) is None or (slot := place(fleet, {device.device: count})) is None:
        return None
    others = [i for i in fleet.instances.values() if on(fleet, i, device.device) and i.instance != instance.instance]
    if device_bytes(fleet, model, device) + sum(held_bytes(fleet, i, device.device) for i in others) > device.usable_bytes:
        return None
    return GrantGiven(
        node=instance.node, device=device.device, instance=instance.instance, offset=slot.offset, cells=slot.cells
    )  # fmt: skip
