"""Plans of gangs: instances that take several whole devices of one node. All of them or none; pure, like `plan`.

The order is that of `plan`: a sleeping gang on its own devices, an idle one that switches, one at `checkpoint` on those where
it was, free devices, devices that become free. Among these, devices that reach one another directly come first.
"""

from collections.abc import Iterable

from controlplane.decisions import standing
from controlplane.decisions.board import Board, Plan
from controlplane.decisions.placement import Slot, gang, neighbours, occupied
from controlplane.fleet.members import Instance, Model
from controlplane.fleet.state import Fleet
from controlplane.rungs import Rung
from controlplane.spec import CELLS


def plan(
    fleet: Fleet, model: Model, sizes: dict[str, int], mates: Iterable[Instance], board: Board, *, overdue: bool
) -> Plan | None:
    """The cheapest way up; None: earlier waiters need every place where it could be."""
    fitting = [
        i for i in mates
        if len(i.devices) == model.spec.gpus and i.instance not in board.kept and all(device in sizes for device in i.devices)
    ]  # fmt: skip
    return (
        _woken(fleet, fitting, board, Rung.SLEEP)
        or _switch(fleet, fitting, board, overdue=overdue)
        or _woken(fleet, fitting, board, Rung.CHECKPOINT)
        or _create(fleet, model, sizes, board)
        or _evict(fleet, model, sizes, fitting, board, overdue=overdue)
    )


def whole(devices: Iterable[str]) -> tuple[Slot, ...]:
    return tuple(Slot(device, 0, CELLS) for device in devices)


def _plan(slots: tuple[Slot, ...], instance: Instance | None = None, grant: int | None = None) -> Plan:
    return Plan(slot=slots[0], others=slots[1:], instance=instance.instance if instance else None, grant=grant)


def _woken(fleet: Fleet, mates: list[Instance], board: Board, rung: Rung) -> Plan | None:
    """One that stands on this rung, where it is or was: a gang does not change its devices."""
    held = occupied(fleet)
    for instance in sorted(mates, key=lambda i: (i.since_ms, i.instance)):
        free = all(not held.get(device, 0) | board.reserved.get(device, 0) for device in instance.devices)
        if instance.rung is rung and free and standing.idle(fleet, instance):
            return _plan(whole(instance.devices), instance)
    return None


def _switch(fleet: Fleet, mates: list[Instance], board: Board, *, overdue: bool) -> Plan | None:
    for instance in sorted(mates, key=lambda i: (i.idle_since_ms, i.instance)):
        claimed = any(board.reserved.get(device, 0) for device in instance.devices)
        if instance.grant is not None and not claimed and standing.evictable(fleet, instance, overdue=overdue):
            return _plan(whole(instance.devices), instance, instance.grant)
    return None


def _create(fleet: Fleet, model: Model, sizes: dict[str, int], board: Board) -> Plan | None:
    slots = gang(fleet, sizes, model.spec.gpus, board.reserved)
    return _plan(slots) if slots else None


def _evict(
    fleet: Fleet, model: Model, sizes: dict[str, int], mates: list[Instance], board: Board, *, overdue: bool
) -> Plan | None:
    """Of all groups of devices that no earlier plan needs the one that costs the least; nobody leaves unless all can."""
    open_ = [device for device in sizes if not board.reserved.get(device, 0)]
    skeletons = [instance for instance in mates if instance.rung in (Rung.SLEEP, Rung.CHECKPOINT)]
    warm = {device for instance in skeletons for device in instance.devices}
    ranked: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    for together in (True, False):
        for group in neighbours(fleet, open_, together=together):
            if len(group) >= model.spec.gpus:
                costs = sorted((_cost(fleet, device, board, warm, overdue=overdue), device) for device in group)
                chosen = costs[: model.spec.gpus]
                total = tuple(sum(parts) for parts in zip(*(cost for cost, _ in chosen), strict=True))
                names = sorted((device for _, device in chosen), key=lambda device: (fleet.devices[device].name, device))
                ranked.append(((*total, int(not together)), tuple(names)))
    if not ranked:
        return None
    _, devices = min(ranked)
    inside = [i for i in fleet.instances.values() if i.grants and _touches(fleet, i, devices)]
    gone = [i for i in inside if standing.leaving(i)]
    victims = [i for i in inside if standing.evictable(fleet, i, overdue=overdue) and i.instance not in board.kept]
    busy = [i for i in inside if i not in gone and i not in victims]
    slots = whole(devices)
    return Plan(
        slot=slots[0], others=slots[1:], victims=() if busy else tuple(i.instance for i in victims),
        occupants=tuple(i.instance for i in (*busy, *gone)),
    )  # fmt: skip


def _cost(fleet: Fleet, device: str, board: Board, warm: set[str], *, overdue: bool) -> tuple[int, int, int, int, int, int]:
    """Who is busy there, how many still climb, how much runs, who must leave, whether it is cold, when it was used last."""
    inside = [i for i in fleet.instances.values() if i.grants and _touches(fleet, i, (device,))]
    victims = [i for i in inside if standing.evictable(fleet, i, overdue=overdue) and i.instance not in board.kept]
    busy = [i for i in inside if i not in victims and not standing.leaving(i)]
    return (
        len(busy), sum(not i.directive_settled for i in busy), sum(i.running + len(i.leased_to) for i in busy), len(victims),
        int(device not in warm), max((i.idle_since_ms for i in victims), default=0),
    )  # fmt: skip


def _touches(fleet: Fleet, instance: Instance, devices: tuple[str, ...]) -> bool:
    return any((grant := fleet.grants.get(number)) is not None and grant.device in devices for number in instance.grants)
