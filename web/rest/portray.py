"""From the fleet's state and the beats to what the REST API shows. Pure."""

from collections.abc import Mapping

import msgspec

from controlplane.fleet import Fleet, Instance, Model, Operation, Request
from controlplane.fleet.images import idle_pins
from controlplane.rungs import Activity, Rung
from controlplane.spec import CELLS
from controlplane.subjects import NodeBeat, Progress
from web.rest import shapes
from web.views.hostmemory import host
from web.views.images import all_off_disk
from web.views.models import belonging, shares_sleeping, state_of


def nodes(fleet: Fleet, beats: Mapping[str, NodeBeat]) -> list[shapes.NodeView]:
    return [
        shapes.NodeView(
            node=node.node, address=node.address, heard=node.heard, left=not node.incarnation, version=node.version,
            pool_budget_bytes=node.pool_budget_bytes,
            pool_used_bytes=beats[node.node].pool_used_bytes if node.node in beats else None,
            host=host(fleet, beats, node.node),
            devices=sorted(device.device for device in fleet.devices.values() if device.node == node.node),
            instances=sorted(instance.instance for instance in fleet.instances.values() if instance.node == node.node),
            notes=list(idle_pins(fleet, node.image_pins)), unsaved=list(all_off_disk(fleet, node.node)),
        )
        for node in sorted(fleet.nodes.values(), key=lambda node: node.node)
    ]  # fmt: skip


def devices(fleet: Fleet, beats: Mapping[str, NodeBeat]) -> list[shapes.DeviceView]:
    shown = []
    for device in sorted(fleet.devices.values(), key=lambda device: (device.node, device.name)):
        grants = sorted((g for g in fleet.grants.values() if g.device == device.device), key=lambda grant: grant.offset)
        beat = beats.get(device.node)
        shown.append(
            shapes.DeviceView(
                device=device.device, name=device.name, node=device.node, kind=device.kind, size_bytes=device.size_bytes,
                used_bytes=beat.device_bytes.get(device.device) if beat else None,
                owners=beat.owners.get(device.device) if beat else None, cells=CELLS,
                foreign=[shapes.OutsiderView(pid=o.pid, name=o.name, size_bytes=o.size_bytes) for o in device.foreign],
                free_cells=CELLS - sum(grant.cells for grant in grants),
                grants=[
                    shapes.CellsView(
                        grant=g.number, instance=g.instance, model=_model_of(fleet, g.instance), offset=g.offset, cells=g.cells,
                        since_ms=g.since_ms,
                    )
                    for g in grants
                ],
            )
        )  # fmt: skip
    return shown


def models(fleet: Fleet, beats: Mapping[str, NodeBeat]) -> list[shapes.ModelView]:
    mine = belonging(fleet)
    return [_model(fleet, beats, fleet.models[name], mine.get(name, [])) for name in sorted(fleet.models)]


def model(fleet: Fleet, beats: Mapping[str, NodeBeat], known: Model) -> shapes.ModelView:
    return _model(fleet, beats, known, belonging(fleet).get(known.model, []))


def _model(fleet: Fleet, beats: Mapping[str, NodeBeat], known: Model, shown: list[Instance]) -> shapes.ModelView:
    own = [i for i in fleet.instances.values() if known.model in (i.model, i.directive.model if i.directive else None)]
    requests = [request for request in fleet.requests.values() if request.model == known.model]
    error: dict[str, object] | None = None
    if known.rejection is not None:
        error = msgspec.to_builtins(known.rejection)
    elif known.set_back is not None:
        error = msgspec.to_builtins(known.set_back)
    progress = _progress(beats, f"model:{known.model}")
    for instance in own:
        progress = progress or _progress(beats, instance.instance)
    told = state_of(fleet, beats, known, shown)
    return shapes.ModelView(
        model=known.model, spec=known.spec, revision=known.revision, origin=known.origin, registered_ms=known.registered_ms,
        retired=known.retired, state=_state(fleet, known, own), words=told.words, why=told.message, facts=known.facts,
        instances=sorted(instance.instance for instance in own), queued=sum(request.instance is None for request in requests),
        running=sum(request.instance is not None for request in requests), progress=progress, error=error,
    )  # fmt: skip


def _state(fleet: Fleet, known: Model, own: list[Instance]) -> str:
    if known.retired:
        return "retired"
    if known.rejection is not None:
        return "rejected"
    serving = [i for i in own if i.model == known.model]
    if any(i.rung is Rung.UP and i.activity is Activity.SETTLED for i in serving):
        return "up"
    if any(i.activity is Activity.CLIMBING and i.directive and i.directive.model == known.model for i in own):
        return "climbing"
    if known.set_back is not None:
        return "backing_off"
    if any(i.activity is Activity.DESCENDING for i in serving):
        return "descending"
    if any(i.rung is Rung.SLEEP for i in serving):
        return "sleep"
    if known.facts is None:
        return "uninspected"
    return "skeleton_asleep" if shares_sleeping(fleet, known) else "cold"


def instances(fleet: Fleet, beats: Mapping[str, NodeBeat]) -> list[shapes.InstanceView]:
    return [instance(beats, fleet.instances[name]) for name in sorted(fleet.instances)]


def instance(beats: Mapping[str, NodeBeat], known: Instance) -> shapes.InstanceView:
    beat = beats.get(known.node)
    rate = next((b.tokens_per_s for b in beat.instances if b.instance == known.instance), None) if beat else None
    directive = known.directive
    return shapes.InstanceView(
        instance=known.instance, node=known.node, configuration=known.configuration, rung=known.rung, activity=known.activity,
        health=known.health.value, model=known.model, target=directive.rung if directive else None,
        target_model=directive.model if directive else None, why=directive.code if directive else "", grant=known.grant,
        running=known.running, served=known.served, pid=known.pid, since_ms=known.since_ms, idle_since_ms=known.idle_since_ms,
        bytes_mapped=known.bytes_mapped, bytes_used=known.bytes_used, host_bytes=known.host_bytes,
        tokens_per_s=rate, progress=_progress(beats, known.instance),
    )  # fmt: skip


def weights(fleet: Fleet) -> list[shapes.WeightsView]:
    return [
        shapes.WeightsView(
            weight_set=known.weight_set, node=known.node, size_bytes=known.size_bytes, used_ms=known.used_ms,
            models=sorted({name for name, _ in known.models}), dismissed=known.dismissed,
        )
        for _, known in sorted(fleet.weights.items())
    ]  # fmt: skip


def request(known: Request, place: int | None) -> shapes.RequestView:
    return shapes.RequestView(
        request=known.request, model=known.model, state="queued" if known.instance is None else "running", kind=known.kind,
        streamed=known.streamed, accepted_ms=known.accepted_ms, instance=known.instance, attempts=known.attempts,
        place=place if known.instance is None else None, code=known.code, reason=known.reason,
        queued_ms=known.routed_ms - known.accepted_ms if known.routed_ms is not None else None,
    )  # fmt: skip


def operation(fleet: Fleet, beats: Mapping[str, NodeBeat], known: Operation) -> shapes.OperationView:
    progress = None
    for instance in fleet.instances.values():
        directive = instance.directive
        if directive is not None and (directive.operation == known.operation or directive.model == known.model):
            progress = progress or _progress(beats, instance.instance)
    if known.model is not None:
        progress = progress or _progress(beats, f"model:{known.model}")
    return shapes.OperationView(
        operation=known.operation, kind=known.kind, state="open", model=known.model, instance=known.instance,
        actor=known.actor, requested_ms=known.requested_ms, progress=progress,
    )  # fmt: skip


def _model_of(fleet: Fleet, instance: str) -> str | None:
    known = fleet.instances.get(instance)
    if known is None:
        return None
    return known.directive.model if known.directive and known.directive.model else known.model


def _progress(beats: Mapping[str, NodeBeat], subject: str) -> shapes.ProgressView | None:
    for beat in beats.values():
        for progress in beat.progress:
            if progress.subject == subject:
                return _shown(progress)
    return None


def _shown(progress: Progress) -> shapes.ProgressView:
    return shapes.ProgressView(step=progress.step, done=progress.done, total=progress.total, unit=progress.unit)
