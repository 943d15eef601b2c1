"""Moves: a live instance goes to another device of its node.

The place there is granted first; the one that it leaves is returned when it serves from the new one, or is gone. Meanwhile it
holds both, serves nobody, and requests for its model wait for it as for any climb. If the move fails, the instance is gone, as
after any failed climb, and whoever waits is served by another.
"""

from typing import Any

from controlplane import ids
from controlplane.commands import Move
from controlplane.decisions import standing
from controlplane.decisions.admission import known
from controlplane.decisions.draft import Draft
from controlplane.decisions.foreign import users
from controlplane.decisions.needs import cells, device_bytes, held_bytes, on
from controlplane.decisions.placement import Slot, occupied, place
from controlplane.decisions.verdict import fail, succeed
from controlplane.events import GrantGiven, InstanceDirected, OperationRequested
from controlplane.fleet.callers import Operation
from controlplane.fleet.members import MOVE, Instance, Model
from controlplane.fleet.places import Device
from controlplane.fleet.reach import NO_CUDA, why_still
from controlplane.fleet.state import Fleet
from controlplane.quantities import need_and_limit
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from controlplane.spec import CELLS


def move(draft: Draft, command: Move) -> None:
    """1. Find the instance. 2. Refuse what can't move, or not now. 3. Find a place. 4. Grant it, and direct the instance."""
    fleet = draft.fleet
    instance = _instance(fleet, command.what)
    target = _device(fleet, command.device)
    model = _check(fleet, instance, target)
    slot, need = _room(fleet, model, instance, target)
    operation = draft.new_id(ids.OPERATION)
    draft.emit(
        OperationRequested(
            operation=operation, kind="move", model=model.model, instance=instance.instance, device=target.device
        ),
        operation=operation,
    )
    grant = draft.emit(
        GrantGiven(
            node=instance.node, device=slot.device, instance=instance.instance, offset=slot.offset, cells=slot.cells
        ),
        operation=operation,
    ).position  # fmt: skip
    draft.emit(
        InstanceDirected(
            node=instance.node, instance=instance.instance, rung=Rung.UP, model=model.model, revision=instance.revision,
            grant=grant, code=MOVE, need_bytes=need,
        ),
        operation=operation,
    )  # fmt: skip


def pursue(draft: Draft, operation: Operation) -> None:
    """End a move that has arrived, or can't any more."""
    instance = draft.fleet.instances.get(operation.instance or "")
    directive = instance.directive if instance else None
    if instance is None or directive is None:
        fail(draft, operation, "instance_lost", f"{operation.instance} ended before it had moved")
    elif directive.operation != operation.operation:
        fail(
            draft, operation, "superseded", f"{instance.instance} was told to go elsewhere: {directive.rung} ({directive.code})"
        )
    elif instance.directive_settled and instance.rung is Rung.UP:
        succeed(draft, operation, f"serves on {standing.name(draft.fleet, instance.device)}")
    elif instance.directive_settled:
        fail(draft, operation, directive.code, f"{instance.instance} could not serve there and is at {instance.rung}")


def _instance(fleet: Fleet, what: str) -> Instance:
    if (named := fleet.instances.get(what)) is not None:
        return named
    model = known(fleet, what)
    up = [i for i in fleet.instances.values() if i.model == model.model and i.rung is Rung.UP]
    if not up:
        raise Refused(Code.NOT_UP, f"{model.model} is not up: only what serves can move; load it first", model=model.model)
    if len(up) > 1:
        names = ", ".join(sorted(i.instance for i in up))
        raise Refused(Code.INVALID, f"{len(up)} instances serve {model.model}: name the one to move ({names})", param="what")
    return up[0]


def _device(fleet: Fleet, name: str) -> Device:
    if (device := fleet.devices.get(name)) is not None:
        return device
    named = [device for device in fleet.devices.values() if device.name == name]
    if len(named) == 1:
        return named[0]
    there = ", ".join(sorted(device.name for device in fleet.devices.values())) or "none"
    message = (
        f"{len(named)} devices are called {name[:100]!r}: give its id"
        if named
        else f"no device {name[:100]!r}; there is {there}"
    )
    raise Refused(Code.DEVICE_UNKNOWN, message, param="device")


def _check(fleet: Fleet, instance: Instance, target: Device) -> Model:
    """Raises Refused: `not_up`, `busy`, `already_there`, `not_available`, `no_node`."""
    name = instance.instance
    details: dict[str, Any] = {"instance": name, "device": target.device}
    if instance.rung is not Rung.UP:
        raise Refused(Code.NOT_UP, f"{name} is at {instance.rung}: only what serves can move", **details)
    if not instance.directive_settled:
        raise Refused(Code.BUSY, f"{name} is on its way elsewhere; ask again when it is there", retry_after_ms=1000, **details)
    if target.device in instance.devices:
        raise Refused(Code.ALREADY_THERE, f"{name} is on {target.name} already", **details)
    if instance.ranks:
        raise Refused(Code.NOT_AVAILABLE, f"{name} takes {len(instance.ranks)} devices: gangs don't move", **details)
    if target.node != instance.node:
        message = f"{name} runs on {instance.node}, {target.name} belongs to {target.node}: moves stay on a node"
        raise Refused(Code.NOT_AVAILABLE, message, **details)
    here = fleet.devices.get(instance.device or "")
    if here is None or here.kind != target.kind:
        message = f"{target.name} is a {target.kind}, {name} runs on a {here.kind if here else 'device that is gone'}"
        raise Refused(Code.NOT_AVAILABLE, message, **details)
    if (why := why_still(fleet, instance)) is not None:
        raise Refused(
            Code.NOT_AVAILABLE, f"a move takes an engine off its GPU on the way, and {why}", reason=NO_CUDA, **details
        )
    if not standing.heard(fleet, instance.node):
        raise Refused(Code.NO_NODE, f"{instance.node} is silent", retry_after_ms=5000, **details)
    model = fleet.models.get(instance.model or "")
    if model is None or model.retired or model.revision != instance.revision or model.facts is None:
        raise Refused(
            Code.NOT_AVAILABLE, f"{name} serves what {instance.model} was before it was changed: load it anew", **details
        )
    return model


def _room(fleet: Fleet, model: Model, instance: Instance, target: Device) -> tuple[Slot, int]:
    """A free place there, and the bytes it is promised. Raises Refused (`no_room`, with both numbers); nobody is sent away."""
    need, count = device_bytes(fleet, model, target), cells(fleet, model, target)
    others = sum(held_bytes(fleet, i, target.device) for i in fleet.instances.values() if on(fleet, i, target.device))
    free = CELLS - occupied(fleet)[target.device].bit_count()
    left = max(0, target.usable_bytes - others)
    numbers: dict[str, Any] = {"need_bytes": need, "limit_bytes": left}
    slot = place(fleet, {target.device: count}) if count is not None else None
    if slot is None:
        message = (
            f"{instance.instance} needs {count or 'more than all'} of the {CELLS} cells of {target.name} side by side, and "
            f"{free} are free: put to sleep what is there, or choose another device"
        )
        raise Refused(Code.NO_ROOM, message, need_cells=count, free_cells=free, **numbers)
    if need > left:
        needs, free_bytes = need_and_limit(need, left)
        strangers = f" and what is not this plane's ({users(target)})" if target.foreign else ""
        message = (
            f"{instance.instance} needs {needs} of {target.name}, and {free_bytes} are free "
            f"beside what sleeps there{strangers}: stop some of it, or choose another device"
        )
        raise Refused(Code.NO_ROOM, message, **numbers)
    return slot, need
