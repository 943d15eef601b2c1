"""What events mean for nodes and their devices."""

from msgspec import structs
from msgspec.structs import replace

from controlplane.events import (
    DeviceDeclared,
    DeviceWithdrawn,
    ForeignMemoryFound,
    ForeignMemoryGone,
    NodeFellSilent,
    NodeHeardAgain,
    NodeJoined,
    NodeLeft,
    NodeLimitsChanged,
)
from controlplane.fleet.places import Device, Node
from controlplane.fleet.state import Fleet


def joined(fleet: Fleet, e: NodeJoined) -> Fleet:
    node = Node(
        node=e.node, address=e.address, incarnation=e.incarnation, boot=e.boot,
        pool_budget_bytes=e.pool_budget_bytes, version=e.version, no_images=e.no_images, no_checkpoint=e.no_checkpoint,
        image_quota_bytes=e.image_quota_bytes, image_pins=e.image_pins, checkpoint_bytes=e.checkpoint_bytes,
    )  # fmt: skip
    return replace(fleet, nodes=fleet.nodes.set(e.node, node))


def heard(fleet: Fleet, e: NodeFellSilent | NodeHeardAgain) -> Fleet:
    node = replace(fleet.nodes[e.node], heard=isinstance(e, NodeHeardAgain))
    return replace(fleet, nodes=fleet.nodes.set(e.node, node))


def left(fleet: Fleet, e: NodeLeft) -> Fleet:
    """No beat of the worker that it had counts any more."""
    node = replace(fleet.nodes[e.node], heard=False, incarnation="")
    return replace(fleet, nodes=fleet.nodes.set(e.node, node))


def limited(fleet: Fleet, e: NodeLimitsChanged) -> Fleet:
    node = replace(fleet.nodes[e.node], **structs.asdict(e.after))
    return replace(fleet, nodes=fleet.nodes.set(e.node, node))


def declared(fleet: Fleet, e: DeviceDeclared) -> Fleet:
    known = fleet.devices.get(e.device)
    device = Device(
        device=e.device, node=e.node, name=e.name, kind=e.kind, size_bytes=e.size_bytes, island=e.island,
        foreign=known.foreign if known else (),
    )  # fmt: skip
    return replace(fleet, devices=fleet.devices.set(e.device, device))


def withdrawn(fleet: Fleet, e: DeviceWithdrawn) -> Fleet:
    return replace(fleet, devices=fleet.devices.delete(e.device))


def shared(fleet: Fleet, e: ForeignMemoryFound | ForeignMemoryGone) -> Fleet:
    """The device is gone already if its node has withdrawn it meanwhile."""
    if (device := fleet.devices.get(e.device)) is None:
        return fleet
    foreign = e.processes if isinstance(e, ForeignMemoryFound) else ()
    return replace(fleet, devices=fleet.devices.set(e.device, replace(device, foreign=foreign)))
