"""What time alone brings about. The desk's ticks are the only clock."""

from controlplane.commands import Tick
from controlplane.decisions import descent, endings, hostroom, images, operations, standing
from controlplane.decisions.draft import Draft
from controlplane.decisions.limits import BACK_OFF_LIMIT_MS, LOST_MS, OVERDUE_MS, QUEUE_DEADLINE_MS, RENEW_AGAIN_MS
from controlplane.decisions.room import in_use
from controlplane.decisions.schedule import advance
from controlplane.decisions.verdict import fail, loads
from controlplane.events import InstanceOverdue, WeightsDismissed
from controlplane.fleet.images import unsaved
from controlplane.fleet.members import Instance
from controlplane.fleet.reach import no_checkpoint
from controlplane.fleet.state import Fleet
from controlplane.rungs import Rung
from controlplane.spec import Idle


def tick(draft: Draft, command: Tick) -> None:
    """1. End what has waited too long. 2. Move the queue on (back-offs may be over). 3. Send the idle down, once nobody wants
    them, and those that take too much of a host. 4. Make stale images anew. 5. Watch transitions."""
    _deadlines(draft, command.since_ms)
    advance(draft)
    operations.pursue(draft)
    _idle(draft)
    hostroom.relieve(draft)
    images.renew(draft)
    retire(draft)
    for instance in draft.fleet.instances.values():
        directive = instance.directive
        if directive is None or instance.directive_settled or directive.overdue:
            continue
        waited = draft.now - directive.at_ms
        if draft.now - max(directive.at_ms, command.since_ms) > OVERDUE_MS:
            draft.emit(
                InstanceOverdue(
                    node=instance.node, instance=instance.instance, directive=directive.number, waited_ms=waited
                ),
                operation=directive.operation, because=directive.number,
            )  # fmt: skip


def _deadlines(draft: Draft, since_ms: int) -> None:
    def past(at_ms: int, limit_ms: int) -> bool:
        return draft.now - max(at_ms, since_ms) >= limit_ms

    now = draft.now
    for waiting in list(draft.fleet.waiting.values()):
        for name in waiting:
            request = draft.fleet.requests[name]
            limit = OVERDUE_MS if request.code == "climbing" else QUEUE_DEADLINE_MS
            if past(request.accepted_ms, limit):
                message = f"waited {(now - request.accepted_ms) // 1000} s (limit {limit // 1000}); last: {request.reason}"
                endings.fail(draft, request, "queue_timeout", message)
    for request in list(draft.fleet.requests.values()):
        if request.lost_ms is not None and past(request.lost_ms, LOST_MS):
            message = f"{request.instance} is gone, and its gateway has not said what became of the request"
            endings.fail(draft, request, "instance_lost", message)
    for load in loads(draft.fleet):
        if past(load.requested_ms, OVERDUE_MS):
            fail(draft, load, "queue_timeout", f"{load.model} was not up after {OVERDUE_MS // 1000} s")
    for save in [o for o in draft.fleet.operations.values() if o.kind == "save"]:
        if past(save.requested_ms, OVERDUE_MS) and (lacks := images.waits_for_place(draft.fleet, save)) is not None:
            fail(draft, save, "queue_timeout", f"after {OVERDUE_MS // 1000} s: {lacks}")


def _idle(draft: Draft) -> None:
    """`up` -> `sleep` -> `checkpoint` -> `saved` (where a model asks for them, and they are possible) -> `cold`, each after its
    own limit.

    The limits are those of the model it served last.
    """
    for instance in draft.fleet.instances.values():
        if not standing.idle(draft.fleet, instance):
            continue
        model = draft.fleet.models.get(instance.model or "")
        limits = model.spec.idle if model else Idle()
        if instance.rung is Rung.UP:
            quiet = draft.now - max(instance.idle_since_ms, instance.since_ms)
            if limits.sleep_ms is not None and quiet >= limits.sleep_ms and standing.evictable(draft.fleet, instance):
                descent.direct(draft, instance, Rung.SLEEP, "idle")
        elif instance.rung is Rung.SLEEP and limits.checkpoint_ms is not None and not no_checkpoint(draft.fleet, instance):
            if draft.now - instance.since_ms >= _after_ms(instance, limits.checkpoint_ms):
                _off(draft, instance, limits)
        else:
            _further(draft, instance, limits, limits.saved_ms)


def _off(draft: Draft, instance: Instance, limits: Idle) -> None:
    """To `checkpoint`; where its host has no room for it, past it if its model may go to disk, else it sleeps on."""
    if hostroom.lacking(draft.fleet, instance):
        _further(draft, instance, limits, None if limits.saved_ms is None else 0)
    else:
        descent.direct(draft, instance, Rung.CHECKPOINT, "idle")


def _further(draft: Draft, instance: Instance, limits: Idle, saved_ms: int | None) -> None:
    """To disk after `saved_ms` (None: its model does not go there), if that is possible; else to its end, after its own limit.

    That limit counts through all tries for which there was no room on disk, and there are none past it.
    """
    stood_ms = instance.unsaved.since_ms if instance.unsaved is not None else instance.since_ms
    ends_ms = None if limits.cold_ms is None else stood_ms + limits.cold_ms
    goes_ms = _goes_ms(draft.fleet, instance, saved_ms)
    too_late = ends_ms is not None and goes_ms is not None and max(goes_ms, draft.now) >= ends_ms
    if goes_ms is not None and not (too_late and unsaved(draft.fleet, instance) is not None):
        if draft.now >= goes_ms:
            images.save(draft, instance, "idle")
    elif ends_ms is not None and draft.now >= ends_ms:
        descent.direct(draft, instance, Rung.COLD, "idle")


def _goes_ms(fleet: Fleet, instance: Instance, limit_ms: int | None) -> int | None:
    """When it goes to disk for having been idle; None: not as things are, or not until there is room.

    Room that is found may be gone again by the time that it is written to: so each try waits longer than the one before.
    """
    if limit_ms is None or instance.rung is Rung.SAVED or images.hindrance(fleet, instance) is not None:
        return None
    if (lacked := unsaved(fleet, instance)) is None:
        return instance.since_ms + _after_ms(instance, limit_ms)
    waits_ms = min(BACK_OFF_LIMIT_MS * 2 ** (lacked.tries - 1), RENEW_AGAIN_MS)
    return instance.since_ms + max(limit_ms, waits_ms) if lacked.room else None


def _after_ms(instance: Instance, limit_ms: int) -> int:
    """When it goes further down: after its limit, but not soon after it came back from there for want of room."""
    return max(limit_ms, BACK_OFF_LIMIT_MS) if standing.fell_short(instance) else limit_ms


def retire(draft: Draft) -> None:
    """What served a model that is retired ends once it is idle; a sleeping skeleton stays while another model can use it.

    Weights that only retired models (or revisions) have leave the pool.
    """
    for instance in draft.fleet.instances.values():
        if not standing.obsolete(draft.fleet, instance) or not standing.idle(draft.fleet, instance):
            continue
        if instance.rung is Rung.UP or not _useful(draft.fleet, instance):
            descent.direct(draft, instance, Rung.COLD, "retired")
    for weights in draft.fleet.weights.values():
        wanted = any((m := draft.fleet.models.get(name)) and not m.retired for name, _ in weights.models)
        if not wanted and not weights.dismissed and not in_use(draft.fleet, weights):
            draft.emit(WeightsDismissed(node=weights.node, weight_set=weights.weight_set, code="retired"))


def _useful(fleet: Fleet, instance: Instance) -> bool:
    return any(
        m.facts is not None and m.facts.configuration == instance.configuration and not m.retired for m in fleet.models.values()
    )
