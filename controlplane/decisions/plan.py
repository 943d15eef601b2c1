"""Plans: how a waiting model gets its place. Pure: nothing is emitted here.

1. A sleeping skeleton of its configuration, with a free slot on the device where it sleeps.
2. An idle instance of its configuration that serves another model: it keeps its grant and switches.
3. A skeleton of its configuration that is off its device: at `checkpoint`, on the device where it was if that has a free slot,
   else on any of its node; or saved, likewise, or on its way from there.
4. A sleeping skeleton of its configuration, with a free slot on another device of its node. One that holds no GPU changes its
   cells; one that does is taken off it first, if a new instance would be a cold start, which takes many times as long.
5. A new instance in a free slot.
6. A slot that becomes free: of the blocks that hold only idle or leaving instances the one with the fewest victims, least
   recently used first; else the block that is likely to be free first, to wait for.

Free cells of a device on which others' memory leaves no bytes for it count in 6 alone. Cells that the plans of earlier waiters
need (`Board.reserved`) are never touched. Gangs have plans of their own (`gangs`).
"""

from collections.abc import Iterable

from controlplane.decisions import foreign, gangs, hostroom, images, standing
from controlplane.decisions.board import Board, Plan
from controlplane.decisions.needs import wanted
from controlplane.decisions.placement import Slot, blocks, mask, place
from controlplane.fleet.members import Instance, Model
from controlplane.fleet.places import Grant
from controlplane.fleet.reach import holds_gpu, why_still
from controlplane.fleet.state import Fleet
from controlplane.rungs import Rung


def plan(fleet: Fleet, model: Model, board: Board, *, overdue: bool = False) -> Plan | None:
    """The cheapest way up for an inspected model; None: earlier waiters need every place where it could be."""
    assert model.facts is not None
    sizes = wanted(fleet, model)
    mates = [i for i in fleet.instances.values() if i.configuration == model.facts.configuration and i.device in sizes]
    if model.spec.gpus > 1:
        return gangs.plan(fleet, model, sizes, mates, board, overdue=overdue)
    open_ = {device: count for device, count in sizes.items() if not foreign.crowded(fleet, model, device)}
    return (
        _wake(fleet, [mate for mate in mates if mate.device in open_], open_, board)
        or _switch(fleet, mates, sizes, board, overdue=overdue)
        or _restore(fleet, model, open_, board)
        or _fetch(fleet, model, mates, open_, board)
        or _create(fleet, open_, board)
        or _evict(fleet, model, sizes, board, overdue=overdue)
    )


def awaited(fleet: Fleet, model: Model, instance: Instance, board: Board) -> Plan | None:
    """The place that is kept for a skeleton while it is fetched, if there is one still."""
    sizes = wanted(fleet, model)
    slot = place(fleet, {d: count for d, count in sizes.items() if fleet.devices[d].node == instance.node}, board.reserved)
    return Plan(slot=slot, instance=instance.instance) if slot else None


def _wake(fleet: Fleet, mates: Iterable[Instance], sizes: dict[str, int], board: Board) -> Plan | None:
    asleep = {i.device: i for i in sorted(mates, key=lambda i: i.since_ms) if _awaits(fleet, i, board)}
    slot = place(fleet, {device: sizes[device] for device in asleep if device is not None}, board.reserved)
    return Plan(slot=slot, instance=asleep[slot.device].instance) if slot else None


def _awaits(fleet: Fleet, instance: Instance, board: Board) -> bool:
    """Whether a sleeper is free to be woken."""
    return instance.rung is Rung.SLEEP and standing.idle(fleet, instance) and instance.instance not in board.kept


def _switch(fleet: Fleet, mates: Iterable[Instance], sizes: dict[str, int], board: Board, *, overdue: bool) -> Plan | None:
    for instance in sorted(mates, key=lambda i: (i.idle_since_ms, i.instance)):
        grant = fleet.grants.get(instance.grant or 0)
        if grant is None or not standing.evictable(fleet, instance, overdue=overdue) or instance.instance in board.kept:
            continue
        held = mask(grant.offset, grant.cells)
        if grant.cells >= sizes[grant.device] and not held & board.reserved.get(grant.device, 0):
            slot = Slot(grant.device, grant.offset, grant.cells)
            return Plan(slot=slot, instance=instance.instance, grant=grant.number)
    return None


def _restore(fleet: Fleet, model: Model, sizes: dict[str, int], board: Board) -> Plan | None:
    assert model.facts is not None
    away = [
        i for i in fleet.instances.values()
        if i.rung in (Rung.CHECKPOINT, Rung.SAVED) and i.configuration == model.facts.configuration
        and (standing.idle(fleet, i) or (standing.rising(i) and standing.heard(fleet, i.node))) and i.instance not in board.kept
    ]  # fmt: skip
    for instance in sorted(away, key=lambda i: (-i.rung.height, not standing.rising(i), i.since_ms, i.instance)):
        at_home = {instance.device: sizes[instance.device]} if instance.device in sizes else {}
        anywhere = {d: count for d, count in sizes.items() if fleet.devices[d].node == instance.node}
        if slot := place(fleet, at_home, board.reserved) or place(fleet, anywhere, board.reserved):
            return Plan(slot=slot, instance=instance.instance)
    return None


def _fetch(fleet: Fleet, model: Model, mates: Iterable[Instance], sizes: dict[str, int], board: Board) -> Plan | None:
    for instance in sorted(mates, key=lambda i: (i.since_ms, i.instance)):
        if not _awaits(fleet, instance, board) or why_still(fleet, instance) is not None:
            continue
        there = {d: count for d, count in sizes.items() if d != instance.device and fleet.devices[d].node == instance.node}
        if (slot := place(fleet, there, board.reserved)) is None:
            continue
        if not holds_gpu(model.spec.engine, model.spec.arguments):
            return Plan(slot=slot, instance=instance.instance)
        if any(image.state == "ok" for image in images.of(fleet, instance)):
            continue
        if not standing.fell_short(instance) and hostroom.lacking(fleet, instance) is None:
            return Plan(slot=slot, fetched=instance.instance)
    return None


def _create(fleet: Fleet, sizes: dict[str, int], board: Board) -> Plan | None:
    slot = place(fleet, sizes, board.reserved)
    return Plan(slot=slot) if slot else None


def _evict(fleet: Fleet, model: Model, sizes: dict[str, int], board: Board, *, overdue: bool) -> Plan | None:
    """Rank every block that no earlier plan needs; the first is the plan.

    Beside others' memory those who stay may leave no bytes for it, whichever cells they hold: then any block waits for them.
    """
    assert model.facts is not None
    warm = {i.device for i in fleet.instances.values() if i.configuration == model.facts.configuration and i.rung is Rung.SLEEP}
    grants: dict[str, list[Grant]] = {}
    for grant in fleet.grants.values():
        grants.setdefault(grant.device, []).append(grant)
    ranked: list[tuple[tuple[int | str | bool, ...], Plan]] = []
    for device, count in sizes.items():
        holders = [fleet.instances[grant.instance] for grant in grants.get(device, ())]
        staying = [i for i in holders if not standing.leaving(i) and not standing.evictable(fleet, i, overdue=overdue)]
        stuck = foreign.crowded(fleet, model, device, staying)
        for slot in blocks(device, count):
            if slot.mask & board.reserved.get(device, 0):
                continue
            inside = [
                fleet.instances[g.instance] for g in grants.get(device, ()) if stuck or slot.mask & mask(g.offset, g.cells)
            ]
            gone = [i for i in inside if standing.leaving(i)]
            victims = [i for i in inside if standing.evictable(fleet, i, overdue=overdue) and i.instance not in board.kept]
            busy = [i for i in inside if i not in gone and i not in victims]
            # Nobody is sent away for a block that stays blocked: its idle instances go when the last busy one is idle.
            found = Plan(
                slot=slot,
                victims=() if busy else tuple(i.instance for i in victims),
                occupants=tuple(i.instance for i in (*busy, *gone)),
            )
            waits = sum(not i.directive_settled for i in busy), sum(i.running + len(i.leased_to) for i in busy)
            last_used = max((i.idle_since_ms for i in victims), default=0)
            ranked.append(((bool(busy), *waits, len(victims), device not in warm, last_used, device, slot.offset), found))
    return min(ranked, key=lambda entry: entry[0])[1] if ranked else None
