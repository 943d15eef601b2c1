"""Who takes part: nodes and their devices, gateways, the reigning decider."""

from controlplane.commands import BeginReign, CloseGateway, Farewell, Hello, NodeHeard, NodeSilent, OpenGateway, ReportForeign
from controlplane.decisions import endings, lifecycle, operations
from controlplane.decisions.draft import Draft
from controlplane.decisions.needs import cannot_fit
from controlplane.decisions.schedule import advance
from controlplane.events import (
    DeviceDeclared,
    DeviceWithdrawn,
    ForeignMemoryFound,
    ForeignMemoryGone,
    GatewayClosed,
    GatewayOpened,
    ImageBuilt,
    ImageRemoved,
    InstanceEnded,
    ModelCleared,
    NodeFellSilent,
    NodeHeardAgain,
    NodeJoined,
    NodeLeft,
    ReignBegan,
    WeightsDropped,
)
from controlplane.fleet.members import ANEW
from controlplane.fleet.places import Node
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung


def begin_reign(draft: Draft, command: BeginReign) -> None:
    draft.emit(ReignBegan(host=command.host, pid=command.pid, epoch=command.epoch))


def hello(draft: Draft, command: Hello) -> None:
    """A worker says what is there. What the plane believes to be there and is not, is gone."""
    known = draft.fleet.nodes.get(command.node)
    if _joins(known, command):
        draft.emit(
            NodeJoined(
                node=command.node, address=command.address, incarnation=command.incarnation, boot=command.boot,
                pool_budget_bytes=command.pool_budget_bytes, version=command.version, no_images=command.no_images,
                image_quota_bytes=command.image_quota_bytes, image_pins=command.image_pins,
                no_checkpoint=command.no_checkpoint, checkpoint_bytes=command.checkpoint_bytes,
            )
        )  # fmt: skip
    elif known is not None and not known.heard:
        draft.emit(NodeHeardAgain(node=command.node))
    _instances(draft, command)
    _devices(draft, command)
    _images(draft, command)
    for weights in draft.fleet.weights.values():
        if weights.node == command.node and weights.weight_set not in command.weight_sets:
            draft.emit(WeightsDropped(node=command.node, weight_set=weights.weight_set, code="lost"))
    for model in draft.fleet.models.values():
        if model.rejection is not None and model.rejection.code == Code.CANNOT_FIT and not cannot_fit(draft.fleet, model):
            draft.emit(ModelCleared(model=model.model))  # the fleet has grown
    advance(draft)
    operations.pursue(draft)


def farewell(draft: Draft, command: Farewell) -> None:
    """What had a process there has none any more, and the pool's sets are gone. What is saved stays; what was to begin begins
    once the node is there again, and nothing is placed on it till then."""
    node = draft.fleet.nodes.get(command.node)
    if node is None:
        raise Refused(Code.NO_NODE, f"no node is called {command.node}")
    if not node.incarnation:
        return
    left = draft.emit(NodeLeft(node=command.node)).position
    for _, instance in sorted(draft.fleet.instances.items()):
        if instance.node != command.node or instance.rung in (Rung.COLD, Rung.SAVED):
            continue
        number = instance.directive.number if instance.directive else 0
        draft.emit(
            InstanceEnded(node=command.node, instance=instance.instance, directive=number, took_ms=0),
            operation=instance.directive.operation if instance.directive else None, because=left,
        )  # fmt: skip
        lifecycle.gone(draft, instance, code="node_left", message=f"{command.node}'s plane was ended")
    for _, weights in sorted(draft.fleet.weights.items()):
        if weights.node == command.node:
            draft.emit(WeightsDropped(node=command.node, weight_set=weights.weight_set, code="left"), because=left)
    advance(draft)
    operations.pursue(draft)


def _joins(known: Node | None, command: Hello) -> bool:
    fields = (
        "address", "incarnation", "boot", "pool_budget_bytes", "version", "no_images", "no_checkpoint", "image_quota_bytes",
        "image_pins", "checkpoint_bytes",
    )  # fmt: skip
    return known is None or any(getattr(known, field) != getattr(command, field) for field in fields)


def _instances(draft: Draft, command: Hello) -> None:
    """What was there (asleep or up) and was not found is lost.

    What is still cold has not begun, and what is saved has no process: its worker will see to it.
    """
    found = {instance.instance for instance in command.instances}
    for instance in draft.fleet.instances.values():
        if instance.node == command.node and instance.rung not in (Rung.COLD, Rung.SAVED) and instance.instance not in found:
            message = f"{instance.instance} was not found on {command.node} when its worker looked"
            lifecycle.lose(draft, instance, step="adopt", code="lost", message=message)


def _images(draft: Draft, command: Hello) -> None:
    """What is on disk and may be used. One that has failed stays known until somebody acts."""
    found = {image.image for image in command.images}
    for image in draft.fleet.images.values():
        if image.node == command.node and image.image not in found and image.state == "ok":
            draft.emit(ImageRemoved(node=command.node, image=image.image, code="lost"))
    for there in command.images:
        known = draft.fleet.images.get(there.image)
        if known is not None and known.leaving:
            continue  # somebody wants it gone: its worker sees to that now
        if known is None or (known.state == "refused" and known.code != ANEW and there.usable):
            draft.emit(
                ImageBuilt(
                    node=command.node, image=there.image, configuration=there.configuration, size_bytes=there.size_bytes,
                    zero_bytes=there.zero_bytes,
                )
            )  # fmt: skip


def _devices(draft: Draft, command: Hello) -> None:
    for found in command.devices:
        known = draft.fleet.devices.get(found.device)
        before = (known.node, known.name, known.kind, known.size_bytes, known.island) if known else None
        if before != (command.node, found.name, found.kind, found.size_bytes, found.island):
            draft.emit(
                DeviceDeclared(
                    node=command.node, device=found.device, name=found.name, kind=found.kind, size_bytes=found.size_bytes,
                    island=found.island,
                )
            )  # fmt: skip
    declared = {found.device for found in command.devices}
    used = {grant.device for grant in draft.fleet.grants.values()} | {
        device for i in draft.fleet.instances.values() for device in i.devices
    }
    for device in draft.fleet.devices.values():
        # One that is still in use stays until a later hello finds it free.
        if device.node == command.node and device.device not in declared and device.device not in used:
            draft.emit(DeviceWithdrawn(node=command.node, device=device.device))


def foreign_memory(draft: Draft, command: ReportForeign) -> None:
    """What a worker has seen on a device, all of it; the same as before changes nothing."""
    device = draft.fleet.devices.get(command.device)
    if device is None or device.node != command.node:
        raise Refused(Code.STALE, f"{command.node} has no device {command.device} any more")
    processes = tuple(sorted(command.processes, key=lambda one: (-one.size_bytes, one.pid)))
    if processes == device.foreign:
        return
    if processes:
        draft.emit(ForeignMemoryFound(node=command.node, device=command.device, processes=processes))
    else:
        draft.emit(ForeignMemoryGone(node=command.node, device=command.device))
    advance(draft)


def node_silent(draft: Draft, command: NodeSilent) -> None:
    node = draft.fleet.nodes.get(command.node)
    if node is None:
        raise Refused(Code.NO_NODE, f"no node is called {command.node}")
    if node.heard:
        draft.emit(NodeFellSilent(node=command.node))
        advance(draft)


def node_heard(draft: Draft, command: NodeHeard) -> None:
    node = draft.fleet.nodes.get(command.node)
    if node is None:
        raise Refused(Code.NO_NODE, f"no node is called {command.node}")
    if not node.heard and node.incarnation:  # else it has left, and this is about the time before
        draft.emit(NodeHeardAgain(node=command.node))
        advance(draft)


def open_gateway(draft: Draft, command: OpenGateway) -> None:
    """A web process starts; an earlier one of the same host is gone."""
    if command.gateway in draft.fleet.gateways:
        return
    for other in draft.fleet.gateways.values():
        if other.host == command.host:
            _close(draft, other.gateway, "replaced")
    draft.emit(GatewayOpened(gateway=command.gateway, host=command.host, pid=command.pid))
    advance(draft)


def close_gateway(draft: Draft, command: CloseGateway) -> None:
    if command.gateway in draft.fleet.gateways:
        _close(draft, command.gateway, command.code)
        advance(draft)


def _close(draft: Draft, gateway: str, code: str) -> None:
    """The requests that it held for callers end with it."""
    for request in list(draft.fleet.requests.values()):
        if request.gateway == gateway:
            endings.cancel(draft, request, "gateway")
    draft.emit(GatewayClosed(gateway=gateway, code=code))
