"""Moving the queue on: the one function that gives waiting work its place.

`advance` goes through all that waits, first come first served, one entry per model (those who wait for one model share its
climb). Each entry is routed, joins a climb, starts one, or claims the place it waits for, so that later ones may go ahead
only where they don't delay it. Every waiting request then carries a code and a sentence that say what it waits for.
"""

from controlplane import ids, unopened
from controlplane.decisions import descent, foothold, foreign, room, standing
from controlplane.decisions.board import Board, Plan
from controlplane.decisions.draft import Draft
from controlplane.decisions.endings import request_operation
from controlplane.decisions.limits import BOUND_MS, REOPENED_MS
from controlplane.decisions.needs import cannot_fit, device_bytes, wanted
from controlplane.decisions.plan import awaited, plan
from controlplane.decisions.verdict import give_up, loads, reject, succeed
from controlplane.decisions.waits import Wait, Want, announce
from controlplane.events import GrantGiven, InstanceCreated, InstanceDirected, RequestRouted
from controlplane.fleet.callers import Request
from controlplane.fleet.members import FETCHED, Instance, Model
from controlplane.fleet.state import Fleet
from controlplane.refusal import Code
from controlplane.rungs import Rung


def advance(draft: Draft) -> None:
    """Give waiting requests and loads their places, as far as there are any now."""
    if not draft.fleet.waiting and not draft.fleet.operations:
        return
    board = Board()
    waits = [(want, _serve(draft, want, board)) for want in wants(draft.fleet)]
    announce(draft, [(want, wait) for want, wait in waits if wait is not None])


def wants(fleet: Fleet) -> list[Want]:
    """What waits, one entry per model, first come first."""
    found: dict[str, Want] = {}
    for model, waiting in fleet.waiting.items():
        first = fleet.requests[waiting[0]]
        found[model] = Want(first.order, first.accepted_ms, model, request_operation(first.request))
    for load in loads(fleet):
        assert load.model is not None
        if load.model not in found or load.order < found[load.model].order:
            found[load.model] = Want(load.order, load.requested_ms, load.model, load.operation)
    return sorted(found.values(), key=lambda want: want.order)


PLACELESS = ("slot_busy", "descending", "making_room", "behind")
"""Codes of those who wait for somebody else's place; the others' way doesn't depend on who is served meanwhile."""


def bound_passed(fleet: Fleet, now: int) -> bool:
    """Whether anybody has waited for a place for so long that warm models may no longer be used past him without looking."""
    for waiting in fleet.waiting.values():
        first = fleet.requests[waiting[0]]
        if now - first.accepted_ms > BOUND_MS and first.code in PLACELESS:
            return True
    return bool(fleet.operations) and any(
        now - load.requested_ms > BOUND_MS and standing.climbing(fleet, fleet.models[load.model or ""]) is None
        for load in loads(fleet)
    )


def route(draft: Draft, request: Request, instance: Instance) -> None:
    assert instance.grant is not None
    assert instance.endpoint is not None
    draft.emit(
        RequestRouted(
            request=request.request, model=request.model, instance=instance.instance, runs_on=instance.node,
            grant=instance.grant, endpoint=instance.endpoint, attempt=request.attempts + 1,
        ),
        operation=request_operation(request.request),
    )  # fmt: skip


def _serve(draft: Draft, want: Want, board: Board) -> Wait | None:
    """Do what can be done for one model's waiters; None: none of them waits any more."""
    model = draft.fleet.models[want.model]
    current = standing.serving(draft.fleet, model, revision=model.revision)
    for load in loads(draft.fleet, want.model) if current else ():
        succeed(draft, load)
    if (instance := standing.serving(draft.fleet, model)) is not None and want.model in draft.fleet.waiting:
        barred_for = board.barred.get(instance.instance)
        _route_waiting(draft, want.model, instance, leased_only=barred_for is not None)
        if want.model in draft.fleet.waiting and barred_for is not None:
            return Wait("behind", f"{want.model} is up, but {barred_for} has waited longer for its place")
        if want.model in draft.fleet.waiting:
            return Wait("reopened", f"interrupted on {instance.instance}; tried again shortly")
    if want.model not in draft.fleet.waiting and not loads(draft.fleet, want.model):
        return None
    return _climb(draft, want, board)


def _route_waiting(draft: Draft, model: str, instance: Instance, *, leased_only: bool) -> None:
    """`leased_only`: somebody waits for the instance to be free, which it isn't before it has served whom it climbed for."""
    for waiting in draft.fleet.waiting[model]:
        request = draft.fleet.requests[waiting]
        if leased_only and waiting not in instance.leased_to:
            continue
        lately = draft.now - request.interrupted_ms < REOPENED_MS
        if not (lately and request.interrupted_on == instance.instance):
            route(draft, request, instance)


def _climb(draft: Draft, want: Want, board: Board) -> Wait | None:
    fleet, model = draft.fleet, draft.fleet.models[want.model]
    if (instance := standing.climbing(fleet, model)) is not None:
        return climbs(fleet, instance, model)
    if (instance := standing.returning(fleet, model)) is not None:
        if _fetched(instance) and (kept := awaited(fleet, model, instance, board)) is not None:
            board.claim(kept)
        return _returns(fleet, instance, model)
    if model.rejection is not None:
        give_up(draft, model, model.rejection.code, model.rejection.message)
        return None
    if model.set_back is not None and model.set_back.retry_at_ms > draft.now:
        back = model.set_back
        why = back.message if unopened.unopened(back.code) else f"its last start failed ({back.message})"
        return Wait("backing_off", f"{why}; the next is tried after a pause")
    if model.facts is None:
        return Wait("inspecting", f"a node is opening the source of {want.model}")
    if (unfit := cannot_fit(fleet, model)) is not None:
        reject(draft, model, Code.CANNOT_FIT, unfit.message(model.model), unfit)
        return None
    overdue = draft.now - want.since_ms > BOUND_MS
    found = plan(fleet, model, board, overdue=overdue)
    if found is None:
        return _placeless(fleet, model)
    board.claim(found)
    if found.ready:
        return _start(draft, want, model, found, board)
    if found.fetched is not None:
        descent.direct(draft, fleet.instances[found.fetched], Rung.CHECKPOINT, FETCHED, operation=want.operation)
        return _returns(draft.fleet, draft.fleet.instances[found.fetched], model)
    for occupant in found.occupants:
        if standing.deserted(fleet, fleet.instances[occupant]):
            room.direct_away(draft, fleet.instances[occupant], Rung.COLD, want.model, want.operation)
    reason = _occupied(draft.fleet, found)
    foothold.prepare(draft, model, found, board, want.operation)
    for victim in found.victims:
        room.direct_away(draft, fleet.instances[victim], Rung.SLEEP, want.model, want.operation)
    if overdue:
        board.barred.update(dict.fromkeys((*found.victims, *found.occupants), want.model))
    return reason


def _start(draft: Draft, want: Want, model: Model, found: Plan, board: Board) -> Wait:
    """The cells are free: start, once the bytes are there too."""
    node = draft.fleet.devices[found.slot.device].node
    asked = room.Asked(want.operation, draft.now - want.since_ms > BOUND_MS)
    for lacking in (
        None if found.grant else room.on_devices(draft, model, found, board, asked),
        room.in_pool(draft, model, node, board, asked),
    ):
        if lacking is not None:
            return Wait("making_room", lacking)
    instance = found.instance
    if instance is None:
        assert model.facts is not None
        instance = draft.new_id(ids.INSTANCE)
        created = InstanceCreated(node=node, instance=instance, configuration=model.facts.configuration)
        draft.emit(created, operation=want.operation)
    grants = draft.fleet.instances[instance].grants if found.grant else _grants(draft, want, found, node, instance)
    first = draft.fleet.waiting.get(want.model, (None,))[0]
    draft.emit(
        InstanceDirected(
            node=node, instance=instance, rung=Rung.UP, model=model.model, revision=model.revision, grant=grants[0],
            gang=grants if len(grants) > 1 else (), code="request" if first else "load", for_request=first,
            need_bytes=device_bytes(draft.fleet, model, draft.fleet.devices[found.slot.device]),
            pool_bytes=model.facts.weight_bytes if model.facts else 0,
        ),
        operation=want.operation,
    )  # fmt: skip
    return climbs(draft.fleet, draft.fleet.instances[instance], model)


def _grants(draft: Draft, want: Want, found: Plan, node: str, instance: str) -> tuple[int, ...]:
    """One for each device of the plan, all in this decision."""
    given: list[int] = []
    for rank, slot in enumerate(found.slots):
        event = GrantGiven(
            node=node, device=slot.device, instance=instance, offset=slot.offset, cells=slot.cells,
            gang=given[0] if given else 0, rank=rank,
        )  # fmt: skip
        given.append(draft.emit(event, operation=want.operation).position)
    return tuple(given)


def climbs(fleet: Fleet, instance: Instance, model: Model) -> Wait:
    where = standing.names(fleet, instance.devices)
    if (target := fleet.grants.get(instance.moving_to or 0)) is not None:
        return Wait("climbing", f"{model.model} moves from {where} to {standing.name(fleet, target.device)}")
    if instance.rung is Rung.UP and instance.model is not None:
        left = instance.model if instance.model != model.model else "an earlier revision"
        return Wait("climbing", f"{model.model} takes over on {where} from {left}")
    return Wait("climbing", f"{model.model} climbs on {where}, from {instance.rung}")


def _returns(fleet: Fleet, instance: Instance, model: Model) -> Wait:
    where = standing.name(fleet, instance.device)
    if _fetched(instance):
        return Wait("descending", f"{model.model} is asleep on {where}, and is taken off it to be brought to another device")
    return Wait("descending", f"{model.model} is on its way to sleep on {where}, and is woken after that")


def _fetched(instance: Instance) -> bool:
    return instance.directive is not None and instance.directive.code == FETCHED


def _placeless(fleet: Fleet, model: Model) -> Wait:
    if not fleet.devices:
        return Wait("no_node", "no node has joined yet")
    if (reason := foreign.hindrance(fleet, model)) is not None:
        return Wait("foreign_memory", reason)
    if not wanted(fleet, model):
        return Wait("node_silent", f"no node that could hold {model.model} is heard from")
    return Wait("behind", f"every place that could hold {model.model} is needed by those who came before")


def _occupied(fleet: Fleet, found: Plan) -> Wait:
    where = standing.names(fleet, [slot.device for slot in found.slots])
    occupants = [fleet.instances[occupant] for occupant in found.occupants]
    for other in occupants:
        if standing.leaving(other):
            continue
        if not other.directive_settled:
            model = other.directive.model if other.directive else None
            return Wait("slot_busy", f"slot busy: {model} is loading on {where}")
        if not standing.heard(fleet, other.node):
            return Wait("node_silent", f"{other.model} holds the place on {where}, and its node is silent")
        does = "serves requests" if other.running else "is kept for a request of its own"  # how many: another number at once
        return Wait("slot_busy", f"slot busy: {other.model} {does} on {where}")
    names = sorted({i.model or i.instance for i in (*occupants, *(fleet.instances[v] for v in found.victims))})
    return Wait("descending", f"{', '.join(names)} leaves {where} to make room")
