"""What events mean for instances: where each is, where it is told to be, what it holds."""

from msgspec.structs import replace

from controlplane.envelope import Recorded
from controlplane.events import (
    ImageRoomFound,
    InstanceCheckpointed,
    InstanceCreated,
    InstanceDirected,
    InstanceEnded,
    InstanceFailed,
    InstanceOverdue,
    InstanceSaved,
    InstanceSlept,
    InstanceUp,
)
from controlplane.fleet import images, requests, weights
from controlplane.fleet.members import DISK_FULL, ENGINE_OUTDATED, Directive, Instance, Unsaved
from controlplane.fleet.state import Fleet
from controlplane.rungs import Rung


def changed(fleet: Fleet, instance: str, **changes: object) -> Fleet:
    return replace(fleet, instances=fleet.instances.set(instance, replace(fleet.instances[instance], **changes)))


def created(fleet: Fleet, e: InstanceCreated, at: int) -> Fleet:
    instance = Instance(instance=e.instance, node=e.node, configuration=e.configuration, created_ms=at, since_ms=at)
    return replace(fleet, instances=fleet.instances.set(e.instance, instance))


def directed(fleet: Fleet, e: InstanceDirected, recorded: Recorded) -> Fleet:
    directive = Directive(
        number=recorded.position, rung=e.rung, model=e.model, revision=e.revision, grant=e.grant, code=e.code,
        at_ms=recorded.at_ms, gang=e.gang, operation=recorded.operation, victim_of=e.victim_of, need_bytes=e.need_bytes,
        pool_bytes=e.pool_bytes,
    )  # fmt: skip
    leased = frozenset({e.for_request}) if e.for_request else frozenset()
    told = changed(fleet, e.instance, directive=directive, leased_to=leased)
    return requests.leased(told, e.for_request, e.instance) if e.for_request else told


def up(fleet: Fleet, e: InstanceUp, at: int) -> Fleet:
    known = fleet.instances[e.instance]
    again = (known.rung, known.model, known.revision) == (Rung.UP, e.model, e.revision)  # only its endpoint is new
    if known.rung in (Rung.COLD, Rung.SAVED):  # a new process: what an old one was measured as must not bar it for ever
        fleet = _measured(fleet, known.configuration, None)
    risen = changed(
        fleet if again else requests.stranded(fleet, known, at), e.instance, rung=Rung.UP, model=e.model,
        since_ms=known.since_ms if again else at, served=known.served if again else 0,
        idle_since_ms=known.idle_since_ms if again else at, revision=e.revision,
        weight_set=e.weight_set, endpoint=e.endpoint, pid=e.pid, bytes_mapped=e.bytes_mapped, bytes_used=e.bytes_used,
        host_bytes=0, image=e.image or known.image,
        unsaved=known.unsaved if _outdated(known) and e.pid == known.pid else None,
    )  # fmt: skip
    if e.grant == known.moving_to and (grant := fleet.grants.get(e.grant)) is not None:
        risen = changed(risen, e.instance, grant=e.grant, device=grant.device, moving_to=None)
    return images.used(weights.used(risen, e.node, e.weight_set, at), e.image, at)


def slept(fleet: Fleet, e: InstanceSlept, at: int) -> Fleet:
    known = fleet.instances[e.instance]
    left = requests.stranded(fleet, known, at)
    return changed(
        left, e.instance, rung=Rung.SLEEP, since_ms=at, pid=e.pid, bytes_mapped=0, bytes_used=e.bytes_used, host_bytes=0,
        weight_set=None, unsaved=_unsaved(known, e, Rung.SLEEP, at),
    )  # fmt: skip


def checkpointed(fleet: Fleet, e: InstanceCheckpointed, at: int) -> Fleet:
    known = fleet.instances[e.instance]
    if e.host_bytes > 0:
        fleet = _measured(fleet, known.configuration, e.host_bytes)
    left = requests.stranded(fleet, known, at)
    return images.used(
        changed(
            left, e.instance, rung=Rung.CHECKPOINT, since_ms=at, pid=e.pid, bytes_mapped=0, bytes_used=0,
            host_bytes=e.host_bytes, weight_set=None, image=e.image or known.image,
            unsaved=_unsaved(known, e, Rung.CHECKPOINT, at),
        ),
        e.image, at,
    )  # fmt: skip


def _unsaved(known: Instance, e: InstanceSlept | InstanceCheckpointed, rung: Rung, at: int) -> Unsaved | None:
    """It stands until it was up, or is on disk; of an outdated process for as long as that lives."""
    was = known.unsaved
    stood_ms = at if known.rung is not rung else was.since_ms if was is not None else known.since_ms
    if e.code not in DISK_FULL | {ENGINE_OUTDATED}:
        return replace(was, since_ms=stood_ms) if was is not None else None
    return Unsaved(e.code, e.message, stood_ms, was.tries + 1 if was is not None else 1)


def _outdated(known: Instance) -> bool:
    return known.unsaved is not None and known.unsaved.code == ENGINE_OUTDATED


def judged_anew(fleet: Fleet, node: str) -> Fleet:
    """Its worker may be of another version than the one that found an engine outdated."""
    for known in fleet.instances.values():
        if known.node == node and _outdated(known):
            fleet = changed(fleet, known.instance, unsaved=None)
    return fleet


def room_found(fleet: Fleet, e: ImageRoomFound) -> Fleet:
    known = fleet.instances[e.instance]
    return changed(fleet, e.instance, unsaved=replace(known.unsaved, room=True)) if known.unsaved is not None else fleet


def _measured(fleet: Fleet, name: str, host_bytes: int | None) -> Fleet:
    known = fleet.configurations.get(name)
    if known is None or known.host_bytes == host_bytes:
        return fleet
    return replace(fleet, configurations=fleet.configurations.set(name, replace(known, host_bytes=host_bytes)))


def saved(fleet: Fleet, e: InstanceSaved, at: int) -> Fleet:
    left = requests.stranded(fleet, fleet.instances[e.instance], at)
    return changed(
        left, e.instance, rung=Rung.SAVED, since_ms=at, image=e.image, pid=None, endpoint=None, device=None, ranks=(),
        bytes_mapped=0, bytes_used=0, host_bytes=0, weight_set=None, unsaved=None,
    )  # fmt: skip


def gone(fleet: Fleet, e: InstanceEnded | InstanceFailed, at: int) -> Fleet:
    left = requests.stranded(fleet, fleet.instances[e.instance], at)
    return replace(left, instances=left.instances.delete(e.instance))


def overdue(fleet: Fleet, e: InstanceOverdue) -> Fleet:
    directive = fleet.instances[e.instance].directive
    return changed(fleet, e.instance, directive=replace(directive, overdue=True)) if directive else fleet
