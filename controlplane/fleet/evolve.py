"""`evolve(state, event) -> state`: what an event means. Pure; folding the log with it gives the live state."""

from collections.abc import Iterable
from typing import assert_never

from immutables import Map
from msgspec.structs import replace

from controlplane.envelope import Recorded
from controlplane.events import (
    ConfigurationFound,
    DeviceDeclared,
    DeviceWithdrawn,
    GatewayClosed,
    GatewayOpened,
    GrantGiven,
    GrantReturned,
    ImageBuilt,
    ImageFailed,
    ImageRefused,
    ImageRemoved,
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
from controlplane.fleet import images, requests
from controlplane.fleet.members import (
    Configuration,
    Device,
    Directive,
    Gateway,
    Grant,
    Instance,
    Model,
    Node,
    Operation,
    Rejection,
    SetBack,
    WeightSet,
)
from controlplane.fleet.state import Fleet
from controlplane.rungs import Rung


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


def _apply(fleet: Fleet, recorded: Recorded) -> Fleet:
    at, position = recorded.at_ms, recorded.position
    match recorded.event:
        case RequestAccepted() as e:
            return requests.accepted(fleet, e, at, position)
        case RequestRouted() as e:
            return requests.routed(fleet, e, at)
        case RequestFinished() | RequestFailed() | RequestCancelled() as e:
            return requests.ended(fleet, e, at)
        case RequestQueued() as e:
            return requests.queued(fleet, e)
        case RequestInterrupted() as e:
            return requests.interrupted(fleet, e, at)
        case GrantGiven() as e:
            grant = Grant(
                number=position, node=e.node, device=e.device, instance=e.instance, offset=e.offset, cells=e.cells, since_ms=at
            )
            given = replace(fleet, grants=fleet.grants.set(position, grant))
            return _instance(given, e.instance, grant=position, device=e.device)
        case GrantReturned() as e:
            freed = replace(fleet, grants=fleet.grants.delete(e.grant))
            instance = freed.instances.get(e.instance)
            return _instance(freed, e.instance, grant=None) if instance and instance.grant == e.grant else freed
        case InstanceCreated() as e:
            instance = Instance(instance=e.instance, node=e.node, configuration=e.configuration, created_ms=at, since_ms=at)
            return replace(fleet, instances=fleet.instances.set(e.instance, instance))
        case InstanceDirected() as e:
            directive = Directive(
                number=position, rung=e.rung, model=e.model, revision=e.revision, grant=e.grant, code=e.code, at_ms=at,
                operation=recorded.operation, victim_of=e.victim_of, need_bytes=e.need_bytes, pool_bytes=e.pool_bytes,
            )  # fmt: skip
            leased = frozenset({e.for_request}) if e.for_request else frozenset()
            directed = _instance(fleet, e.instance, directive=directive, leased_to=leased)
            return requests.leased(directed, e.for_request, e.instance) if e.for_request else directed
        case InstanceUp() as e:
            known = fleet.instances[e.instance]
            again = (known.rung, known.model, known.revision) == (Rung.UP, e.model, e.revision)  # only its endpoint is new
            up = _instance(
                fleet if again else requests.stranded(fleet, known, at), e.instance, rung=Rung.UP, model=e.model,
                since_ms=known.since_ms if again else at, served=known.served if again else 0,
                idle_since_ms=known.idle_since_ms if again else at, revision=e.revision,
                weight_set=e.weight_set, endpoint=e.endpoint, pid=e.pid, bytes_mapped=e.bytes_mapped, bytes_used=e.bytes_used,
                image=e.image or known.image,
            )  # fmt: skip
            return images.used(_weights_used(up, e.node, e.weight_set, at), e.image, at)
        case InstanceSlept() as e:
            left = requests.stranded(fleet, fleet.instances[e.instance], at)
            return _instance(
                left, e.instance, rung=Rung.SLEEP, since_ms=at, pid=e.pid, bytes_mapped=0, bytes_used=e.bytes_used,
                weight_set=None,
            )  # fmt: skip
        case InstanceSaved() as e:
            left = requests.stranded(fleet, fleet.instances[e.instance], at)
            return _instance(
                left, e.instance, rung=Rung.SAVED, since_ms=at, image=e.image, pid=None, endpoint=None, device=None,
                bytes_mapped=0, bytes_used=0, weight_set=None,
            )  # fmt: skip
        case InstanceEnded() | InstanceFailed() as e:
            left = requests.stranded(fleet, fleet.instances[e.instance], at)
            return replace(left, instances=left.instances.delete(e.instance))
        case InstanceOverdue() as e:
            overdue = fleet.instances[e.instance].directive
            return _instance(fleet, e.instance, directive=replace(overdue, overdue=True)) if overdue else fleet
        case _:
            return _apply_rare(fleet, recorded)


def _apply_rare(fleet: Fleet, recorded: Recorded) -> Fleet:
    at = recorded.at_ms
    match recorded.event:
        case ReignBegan() as e:
            return replace(fleet, epoch=e.epoch)
        case GatewayOpened() as e:
            gateway = Gateway(gateway=e.gateway, host=e.host, pid=e.pid, opened_ms=at)
            return replace(fleet, gateways=fleet.gateways.set(e.gateway, gateway))
        case GatewayClosed() as e:
            return replace(fleet, gateways=fleet.gateways.delete(e.gateway))
        case SettingsApplied() as e:
            return replace(fleet, settings_digest=e.digest)
        case NodeJoined() as e:
            node = Node(
                node=e.node, address=e.address, incarnation=e.incarnation, boot=e.boot,
                pool_budget_bytes=e.pool_budget_bytes, version=e.version, no_images=e.no_images,
            )  # fmt: skip
            return replace(fleet, nodes=fleet.nodes.set(e.node, node))
        case NodeFellSilent() as e:
            return replace(fleet, nodes=fleet.nodes.set(e.node, replace(fleet.nodes[e.node], heard=False)))
        case NodeHeardAgain() as e:
            return replace(fleet, nodes=fleet.nodes.set(e.node, replace(fleet.nodes[e.node], heard=True)))
        case DeviceDeclared() as e:
            device = Device(device=e.device, node=e.node, name=e.name, kind=e.kind, size_bytes=e.size_bytes)
            return replace(fleet, devices=fleet.devices.set(e.device, device))
        case DeviceWithdrawn() as e:
            return replace(fleet, devices=fleet.devices.delete(e.device))
        case ModelRegistered() as e:
            model = Model(
                model=e.model, spec=e.spec, revision=e.revision, origin=e.origin, registered_ms=at, fresh_ms=at,
                first_revision=e.revision,
            )  # fmt: skip
            return _with_model(fleet, model)
        case ModelRevised() as e:
            old = fleet.models[e.model]
            model = replace(old, spec=e.spec, revision=e.revision)
            if e.hard:
                model = replace(model, facts=None, rejection=None, set_back=None, fresh_ms=at)
            return _with_model(fleet, model)
        case ModelRetired() as e:
            retired = replace(fleet, models=fleet.models.set(e.model, replace(fleet.models[e.model], retired=True)))
            return replace(retired, aliases=_aliases_without(fleet, e.model))
        case ModelInspected() as e:
            return _model(fleet, e.model, facts=e.facts, rejection=None)
        case ModelRejected() as e:
            return _model(fleet, e.model, rejection=Rejection(e.code, e.message, e.need_bytes, e.limit_bytes))
        case ModelSetBack() as e:
            counted = requests.set_back(fleet, e.model)
            return _model(counted, e.model, set_back=SetBack(e.failures, e.retry_at_ms, e.code, e.message))
        case ModelCleared() as e:
            return _model(fleet, e.model, set_back=None, rejection=None, fresh_ms=at)
        case ConfigurationFound() as e:
            found = Configuration(
                configuration=e.configuration, engine=e.engine, architecture=e.architecture, arguments=e.arguments
            )
            return replace(fleet, configurations=fleet.configurations.set(e.configuration, found))
        case SkeletonMeasured() as e:
            measured = replace(fleet.configurations[e.configuration], skeleton_bytes=e.size_bytes)
            return replace(fleet, configurations=fleet.configurations.set(e.configuration, measured))
        case WeightsStaged() as e:
            key = f"{e.node}/{e.weight_set}"
            known = fleet.weights.get(key)
            models = (*(known.models if known else ()), (e.model, e.revision))
            staged = WeightSet(
                weight_set=e.weight_set, node=e.node, size_bytes=e.size_bytes, models=tuple(dict.fromkeys(models)), used_ms=at
            )
            return replace(fleet, weights=fleet.weights.set(key, staged))
        case WeightsDismissed() as e:
            key = f"{e.node}/{e.weight_set}"
            return replace(fleet, weights=fleet.weights.set(key, replace(fleet.weights[key], dismissed=True)))
        case WeightsDropped() as e:
            return replace(fleet, weights=fleet.weights.delete(f"{e.node}/{e.weight_set}"))
        case ImageBuilt() as e:
            return images.built(fleet, e, at)
        case ImageRefused() | ImageFailed() as e:
            return images.judged(fleet, e)
        case ImageRemoved() as e:
            return images.removed(fleet, e)
        case OperationRequested() as e:
            operation = Operation(
                operation=e.operation, kind=e.kind, model=e.model, instance=e.instance, requested_ms=at, actor=recorded.actor,
                order=recorded.position,
            )  # fmt: skip
            return replace(fleet, operations=fleet.operations.set(e.operation, operation))
        case OperationSucceeded() | OperationFailed() as e:
            return replace(fleet, operations=fleet.operations.delete(e.operation))
        case (
            RequestAccepted() | RequestQueued() | RequestRouted() | RequestInterrupted() | RequestFinished() | RequestFailed()
            | RequestCancelled() | GrantGiven() | GrantReturned() | InstanceCreated() | InstanceDirected() | InstanceUp()
            | InstanceSlept() | InstanceSaved() | InstanceEnded() | InstanceFailed() | InstanceOverdue()
        ):  # fmt: skip
            raise AssertionError("handled by _apply")
        case _ as unreachable:
            assert_never(unreachable)


def _instance(fleet: Fleet, instance: str, **changes: object) -> Fleet:
    return replace(fleet, instances=fleet.instances.set(instance, replace(fleet.instances[instance], **changes)))


def _model(fleet: Fleet, model: str, **changes: object) -> Fleet:
    return replace(fleet, models=fleet.models.set(model, replace(fleet.models[model], **changes)))


def _with_model(fleet: Fleet, model: Model) -> Fleet:
    aliases = _aliases_without(fleet, model.model)
    for alias in model.spec.aliases:
        aliases = aliases.set(alias, model.model)
    return replace(fleet, models=fleet.models.set(model.model, model), aliases=aliases)


def _aliases_without(fleet: Fleet, model: str) -> "Map[str, str]":
    aliases = fleet.aliases
    for alias, target in fleet.aliases.items():
        if target == model:
            aliases = aliases.delete(alias)
    return aliases


def _weights_used(fleet: Fleet, node: str, weight_set: str, at: int) -> Fleet:
    key = f"{node}/{weight_set}"
    known = fleet.weights.get(key)
    return replace(fleet, weights=fleet.weights.set(key, replace(known, used_ms=at))) if known else fleet
