"""Skeletons on disk: what nodes report of their images, and when an instance may be sent there."""

import msgspec

from controlplane.commands import ReportImageBuilt, ReportImageFailed, ReportImageRefused, ReportImageRemoved
from controlplane.decisions.draft import Draft
from controlplane.decisions.needs import cells, device_bytes, held_bytes, on
from controlplane.decisions.placement import place
from controlplane.events import GrantGiven, ImageBuilt, ImageFailed, ImageRefused, ImageRemoved, InstanceDirected
from controlplane.fleet.members import Image, Instance, Model
from controlplane.fleet.state import Fleet
from controlplane.rungs import Rung


def built(draft: Draft, report: ReportImageBuilt) -> None:
    known = draft.fleet.images.get(report.image)
    if known is None or known.state != "ok" or known.size_bytes != report.size_bytes:
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
    if report.image in draft.fleet.images:
        draft.emit(ImageRemoved(**msgspec.structs.asdict(report)))


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
    return None


def save(draft: Draft, instance: Instance, code: str, *, operation: str | None = None, because: int | None = None) -> bool:
    """Direct it to disk, if that is possible now; False: it needs a place for the proof of a new image, and there is none."""
    fleet, grant = draft.fleet, instance.grant
    model = fleet.models.get(instance.model or "")
    if grant is None and not any(i.state == "ok" for i in of(fleet, instance)):
        if (given := _place(fleet, instance, model)) is None:
            return False
        grant = draft.emit(given, operation=operation).position
    draft.emit(
        InstanceDirected(
            node=instance.node, instance=instance.instance, rung=Rung.SAVED, grant=grant, code=code, model=instance.model,
            revision=instance.revision, need_bytes=_need(fleet, instance, model) if instance.grant is None and grant else 0,
        ),
        operation=operation, because=because,
    )  # fmt: skip
    return True


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
    if device_bytes(fleet, model, device) + sum(held_bytes(fleet, i, device.device) for i in others) > device.size_bytes:
        return None
    return GrantGiven(
        node=instance.node, device=device.device, instance=instance.instance, offset=slot.offset, cells=slot.cells
    )  # fmt: skip
