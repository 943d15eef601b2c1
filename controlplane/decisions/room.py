"""Room in bytes for a climb whose cells are free: on the device, beside sleepers, and in the node's pool.

Both work alike: what is on its way out counts as promised, so nothing is sent away twice for one climb; what is missing
beyond that is sent away now, least recently used first; the climb waits until the room is there.
"""

import msgspec
from msgspec.structs import replace

from controlplane.decisions import descent, hostroom, standing
from controlplane.decisions.board import Board, Plan
from controlplane.decisions.draft import Draft
from controlplane.decisions.foreign import users
from controlplane.decisions.needs import device_bytes, held_bytes, on
from controlplane.events import WeightsDismissed
from controlplane.fleet.members import Instance, Model, WeightSet
from controlplane.fleet.reach import no_checkpoint
from controlplane.fleet.state import Fleet
from controlplane.fleet.weights import parts
from controlplane.quantities import human_bytes, need_and_limit
from controlplane.rungs import Rung


class Asked(msgspec.Struct, frozen=True):
    """Under which operation, and whether whoever asks has waited past the bound."""

    operation: str | None
    overdue: bool


def on_devices(draft: Draft, model: Model, plan: Plan, board: Board, asked: Asked) -> str | None:
    """None: the bytes are there, on each device of the plan. Else a sentence that says what has to leave first, and it has
    been told to: on all of them at once."""
    each = [replace(plan, slot=slot, others=()) for slot in plan.slots]
    lacking = [_on_device(draft, model, part, board, asked) for part in each]
    return next((reason for reason in lacking if reason is not None), None)


def _on_device(draft: Draft, model: Model, plan: Plan, board: Board, asked: Asked) -> str | None:
    fleet = draft.fleet
    device = fleet.devices[plan.slot.device]
    others = [i for i in fleet.instances.values() if on(fleet, i, device.device) and i.instance != plan.instance]
    need = device_bytes(fleet, model, device)
    claimed = board.device_claims.get(device.device, 0)
    missing = need + claimed + sum(held_bytes(fleet, i, device.device) for i in others) - device.usable_bytes
    if missing <= 0:
        return None
    board.device_claims[device.device] = claimed + need
    going = [i for i in others if standing.leaving(i)]
    missing -= sum(held_bytes(fleet, i, device.device) for i in going)
    told = 0
    for sleeper in _sleepers(fleet, others, board):
        if missing <= 0:
            break
        if no_checkpoint(fleet, sleeper):
            direct_away(draft, sleeper, Rung.COLD, model.model, asked.operation)
        elif hostroom.lacking(draft.fleet, sleeper):
            hostroom.below(draft, sleeper, "evicted", victim_of=model.model, operation=asked.operation)
        else:
            direct_away(draft, sleeper, Rung.CHECKPOINT, model.model, asked.operation)
        missing -= held_bytes(fleet, sleeper, device.device)
        told += 1
    if not going and not told and not (told := _evict(draft, others, missing, model.model, asked)):
        busy = [i for i in others if i.running or not i.directive_settled or i.leased_to]
        if not busy:
            return None  # nothing there could make room: the worker measures, and says so with both numbers
        _bar(others, model.model, board, asked)
    needs, has = need_and_limit(need, device.size_bytes)
    beside = (
        f", {human_bytes(device.usable_bytes)} beside memory that is not this plane's: {users(device)}"
        if device.foreign
        else ""
    )
    return f"{model.model} needs {needs} of {device.name} ({has}{beside}); others there have to leave first"


def _sleepers(fleet: Fleet, others: list[Instance], board: Board) -> list[Instance]:
    asleep = [i for i in others if i.rung is Rung.SLEEP and standing.idle(fleet, i) and i.instance not in board.kept]
    return sorted(asleep, key=lambda i: (i.since_ms, i.instance))


def _bar(holders: list[Instance], model: str, board: Board, asked: Asked) -> None:
    """Past the bound, the one that will be idle first gets no new requests. There is always one, so its turn comes."""
    up = [i for i in holders if i.rung is Rung.UP and i.directive_settled]
    if asked.overdue and up:
        board.barred[min(up, key=lambda i: (i.running, i.idle_since_ms, i.instance)).instance] = model


def _evict(draft: Draft, others: list[Instance], missing: int, victim_of: str, asked: Asked) -> int:
    """Send idle instances to sleep, least recently used first, until they free that much; how many were sent."""
    told = 0
    for instance in sorted(others, key=lambda i: (i.idle_since_ms, i.instance)):
        if missing <= 0:
            break
        if standing.evictable(draft.fleet, instance, overdue=asked.overdue):
            direct_away(draft, instance, Rung.SLEEP, victim_of, asked.operation)
            missing -= instance.bytes_used
            told += 1
    return told


def direct_away(draft: Draft, instance: Instance, rung: Rung, victim_of: str, operation: str | None) -> None:
    descent.direct(draft, instance, rung, "evicted", victim_of=victim_of, operation=operation)


def pool_has_room(fleet: Fleet, model: Model, node: str, board: Board) -> bool:
    """Whether the model's weights are in the node's pool, or fit there beside all that is or is promised."""
    assert model.facts is not None
    sets = [w for w in fleet.weights.values() if w.node == node]
    mine = next((w for w in sets if (model.model, model.revision) in w.models), None)
    if mine is not None:
        return not mine.dismissed
    claimed = board.pool_claims.get(node, 0) + _staging(fleet, node, sets)
    there = model.facts.weight_bytes + claimed + sum(w.size_bytes for w in sets)
    return there <= fleet.nodes[node].pool_budget_bytes


def in_pool(draft: Draft, model: Model, node: str, board: Board, asked: Asked) -> str | None:
    """Likewise for the model's weights in the node's pool."""
    fleet = draft.fleet
    assert model.facts is not None
    sets = [w for w in fleet.weights.values() if w.node == node]
    mine = next((w for w in sets if (model.model, model.revision) in w.models), None)
    if mine is not None and not mine.dismissed:
        return None
    budget, need = fleet.nodes[node].pool_budget_bytes, model.facts.weight_bytes
    claimed = board.pool_claims.get(node, 0) + _staging(fleet, node, sets)
    missing = need + claimed + sum(w.size_bytes for w in sets) - budget
    if missing <= 0 and mine is None:
        return None
    board.pool_claims[node] = board.pool_claims.get(node, 0) + need
    going = [w for w in sets if w.dismissed]
    missing -= sum(w.size_bytes for w in going)
    told = 0
    for weights in sorted((w for w in sets if not w.dismissed), key=lambda w: (w.used_ms, w.weight_set)):
        if missing <= 0:
            break
        if not in_use(fleet, weights):
            event = WeightsDismissed(node=node, weight_set=weights.weight_set, code="room", need_bytes=need)
            draft.emit(event, operation=asked.operation)
            missing -= weights.size_bytes
            told += 1
    if missing > 0 and not told and not going:
        here = [i for i in fleet.instances.values() if i.node == node]
        if not any(standing.leaving(i) for i in here) and not _evict(draft, here, missing, model.model, asked):
            _bar(here, model.model, board, asked)
    needs, has = need_and_limit(need, budget)
    return f"{model.model} needs {needs} of the pool on {node} ({has}); other weights have to leave first"


def in_use(fleet: Fleet, weights: WeightSet) -> bool:
    """Mapped by an instance that is `up`, or wanted by one that climbs."""
    for instance in fleet.instances.values():
        if instance.node != weights.node:
            continue
        if weights.weight_set in parts(instance.weight_set) and instance.rung is Rung.UP:
            return True
        directive = instance.directive
        if directive is None or (directive.model, directive.revision) not in weights.models:
            continue
        if directive.rung is Rung.UP or (directive.rung is Rung.SAVED and not instance.directive_settled):
            return True  # on its way up, or to be woken once more as the proof of its image
        if directive.rung is Rung.CHECKPOINT and directive.model in fleet.waiting:
            return True  # it waits for a place, and these with it
    return False


def _staging(fleet: Fleet, node: str, sets: list[WeightSet]) -> int:
    """Bytes promised to climbs under way whose weights are not in the pool yet."""
    staged = {pair for weights in sets for pair in weights.models}
    promised: dict[tuple[str, int], int] = {}
    for instance in fleet.instances.values():
        directive = instance.directive
        if instance.node != node or directive is None or directive.model is None or instance.directive_settled:
            continue
        climbs = directive.rung in (Rung.UP, Rung.CHECKPOINT)
        if climbs and (directive.model, directive.revision) not in staged:
            promised[directive.model, directive.revision] = directive.pool_bytes
    return sum(promised.values())
