"""`evolve(state, event) -> state`: what an event means. Pure; folding the log with it gives the live state."""

from collections.abc import Iterable
from typing import assert_never

from msgspec.structs import replace

from controlplane.envelope import Recorded
from controlplane.events import (
    ConfigurationFound,
    DeviceDeclared,
    DeviceWithdrawn,
    ForeignMemoryFound,
    ForeignMemoryGone,
    GatewayClosed,
    GatewayOpened,
    GrantGiven,
    GrantReturned,
    ImageBuilt,
    ImageDismissed,
    ImageFailed,
    ImagePinned,
    ImageRefused,
    ImageRemoved,
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
    ModelCleared,
    ModelInspected,
    ModelRegistered,
    ModelRejected,
    ModelRetired,
    ModelRevised,
    ModelSetBack,
    NodeFellSilent,
    NodeHeardAgain,
    NodeJoined,
    NodeLeft,
    NodeLimitsChanged,
    OperationFailed,
    OperationRequested,
    OperationSucceeded,
    ReignBegan,
    RequestAccepted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestQueued,
    RequestRouted,
    SettingsApplied,
    SkeletonMeasured,
    WeightsDismissed,
    WeightsDropped,
    WeightsStaged,
)
from controlplane.fleet import grants, images, instances, models, nodes, requests, weights
from controlplane.fleet.callers import Gateway, Operation
from controlplane.fleet.members import Configuration
from controlplane.fleet.state import Fleet


class Gap(Exception):
    """An event does not follow the state's position: something in between is missing, or it was seen already."""


def fold(events: Iterable[Recorded], fleet: Fleet | None = None) -> Fleet:
    """Evolve `fleet` (default: the empty one) over `events` in order."""
    state = fleet or Fleet()
    for recorded in events:
        state = evolve(state, recorded)
    return state


def evolve(fleet: Fleet, recorded: Recorded) -> Fleet:
    """Return the state after `recorded`, which must have position `fleet.position + 1`. Raises Gap otherwise."""
    if recorded.position != fleet.position + 1:
        raise Gap(f"event {recorded.position} does not follow position {fleet.position}")
    changed = _apply(fleet, recorded)
    if recorded.event.ENDS:
        versions = fleet.versions.delete(recorded.stream) if recorded.stream in fleet.versions else fleet.versions
    else:
        versions = fleet.versions.set(recorded.stream, recorded.version)
    return replace(changed, position=recorded.position, versions=versions)


def _apply(fleet: Fleet, recorded: Recorded) -> Fleet:  # noqa: PLR0915 - one case per event
    """Hand the event to what it is about; the frequent ones come first, as cases are tried in order."""
    at, position = recorded.at_ms, recorded.position
    match recorded.event:
        case RequestAccepted() as e:
            return requests.accepted(fleet, e, at, position)
        case RequestRouted() as e:
            return requests.routed(fleet, e, at)
        case RequestFinished() | RequestFailed() | RequestCancelled() as e:
            return requests.ended(fleet, e, at)
        case RequestQueued() as e:
            return requests.queued(fleet, e, at)
        case RequestInterrupted() as e:
            return requests.interrupted(fleet, e, at)
        case GrantGiven() as e:
            return grants.given(fleet, e, at, position)
        case GrantReturned() as e:
            return grants.returned(fleet, e)
        case InstanceCreated() as e:
            return instances.created(fleet, e, at)
        case InstanceDirected() as e:
            return instances.directed(fleet, e, recorded)
        case InstanceUp() as e:
            return instances.up(fleet, e, at)
        case InstanceSlept() as e:
            return instances.slept(fleet, e, at)
        case InstanceCheckpointed() as e:
            return instances.checkpointed(fleet, e, at)
        case InstanceSaved() as e:
            return instances.saved(fleet, e, at)
        case InstanceEnded() | InstanceFailed() as e:
            return instances.gone(fleet, e, at)
        case InstanceOverdue() as e:
            return instances.overdue(fleet, e)
        case WeightsStaged() as e:
            return weights.staged(fleet, e, at)
        case WeightsDismissed() as e:
            return weights.dismissed(fleet, e)
        case WeightsDropped() as e:
            return weights.dropped(fleet, e)
        case ImageBuilt() as e:
            return images.built(fleet, e, at)
        case ImageRefused() | ImageFailed() as e:
            return images.judged(fleet, e)
        case ImageDismissed() as e:
            return images.dismissed(fleet, e, recorded.actor)
        case ImagePinned() as e:
            return images.pinned(fleet, e)
        case ImageRemoved() as e:
            return images.removed(fleet, e)
        case ImageRoomFound() as e:
            return instances.room_found(fleet, e)
        case ModelRegistered() as e:
            return models.registered(fleet, e, at)
        case ModelRevised() as e:
            return models.revised(fleet, e, at)
        case ModelRetired() as e:
            return models.retired(fleet, e)
        case ModelInspected() as e:
            return models.inspected(fleet, e)
        case ModelRejected() as e:
            return models.rejected(fleet, e)
        case ModelSetBack() as e:
            return models.set_back(fleet, e)
        case ModelCleared() as e:
            return models.cleared(fleet, e, at)
        case NodeJoined() as e:
            return instances.judged_anew(nodes.joined(fleet, e), e.node)
        case NodeFellSilent() | NodeHeardAgain() as e:
            return nodes.heard(fleet, e)
        case NodeLeft() as e:
            return nodes.left(fleet, e)
        case NodeLimitsChanged() as e:
            return nodes.limited(fleet, e)
        case DeviceDeclared() as e:
            return nodes.declared(fleet, e)
        case DeviceWithdrawn() as e:
            return nodes.withdrawn(fleet, e)
        case ForeignMemoryFound() | ForeignMemoryGone() as e:
            return nodes.shared(fleet, e)
        case ConfigurationFound() as e:
            found = Configuration(
                configuration=e.configuration, engine=e.engine, architecture=e.architecture, arguments=e.arguments
            )
            return replace(fleet, configurations=fleet.configurations.set(e.configuration, found))
        case SkeletonMeasured() as e:
            measured = replace(fleet.configurations[e.configuration], skeleton_bytes=e.size_bytes)
            return replace(fleet, configurations=fleet.configurations.set(e.configuration, measured))
        case OperationRequested() as e:
            operation = Operation(
                operation=e.operation, kind=e.kind, model=e.model, instance=e.instance, requested_ms=at, actor=recorded.actor,
                device=e.device, order=position,
            )  # fmt: skip
            return replace(fleet, operations=fleet.operations.set(e.operation, operation))
        case OperationSucceeded() | OperationFailed() as e:
            return replace(fleet, operations=fleet.operations.delete(e.operation))
        case GatewayOpened() as e:
            gateway = Gateway(gateway=e.gateway, host=e.host, pid=e.pid, opened_ms=at)
            return replace(fleet, gateways=fleet.gateways.set(e.gateway, gateway))
        case GatewayClosed() as e:
            return replace(fleet, gateways=fleet.gateways.delete(e.gateway))
        case ReignBegan() as e:
            return replace(fleet, epoch=e.epoch)
        case SettingsApplied() as e:
            return replace(fleet, settings_digest=e.digest)
        case _ as unreachable:
            assert_never(unreachable)
