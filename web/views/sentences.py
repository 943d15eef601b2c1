"""One sentence per event: what happened, with its numbers."""

from collections.abc import Iterator
from typing import assert_never

from controlplane.answer import note
from controlplane.events import (
    AnyEvent,
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
    NodeLimits,
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
from controlplane.rungs import Rung
from controlplane.spec import CELLS
from web.views.figures import share, short, size, span
from web.views.requests import counted
from web.views.standing import CAUSES

GOALS = {"sleep": "asleep", "checkpoint": "off its device", "saved": "on disk", "cold": "gone"}
"""Rungs as an instance's goal, where it serves no model there."""
ORIGINS = {"settings": "the settings file", "api": "the API"}


def sentence(event: AnyEvent) -> str:
    """Say what happened."""
    match event:
        case RequestAccepted() as e:
            return f"{e.kind} for {e.model}, {size(e.prompt_bytes)} of prompt"
        case RequestQueued() as e:
            return f"waits at place {e.place}: {e.reason}"
        case RequestRouted() as e:
            again = f", attempt {e.attempt}" if e.attempt > 1 else ""
            return f"{e.model} runs on {short(e.instance)}{again}"
        case RequestInterrupted() as e:
            return f"{short(e.instance)} was lost ({e.code}); queued again"
        case RequestFinished() as e:
            tokens = f"{e.completion_tokens} token{'' if e.completion_tokens == 1 else 's'}"
            return f"{e.model}: {tokens} in {span(e.took_ms)}, {e.finish_reason}"
        case RequestFailed() as e:
            return f"{e.model} failed ({e.code}): {e.message}"
        case RequestCancelled() as e:
            tokens = f", {e.completion_tokens} tokens so far" if counted(e) else ""
            return f"{e.model} cancelled by {e.by} while {e.phase}{tokens}"
        case GrantGiven() as e:
            rank = f", rank {e.rank} of its gang" if e.gang else ""
            part = "a whole device" if e.cells == CELLS else f"{share(e.cells)} of a device, from cell {e.offset}"
            return f"{short(e.instance)} holds {part}{rank}"
        case GrantReturned() as e:
            return f"{short(e.instance)} gave back grant {e.grant}"
        case _:
            return _of_instances(event)


def _of_instances(event: AnyEvent) -> str:
    match event:
        case InstanceCreated() as e:
            return f"{short(e.instance)} on {e.node}, configuration {short(e.configuration)}"
        case InstanceDirected() as e:
            goal = f"serve {e.model}" if e.rung is Rung.UP else f"be {GOALS.get(e.rung.value, e.rung.value)}"
            why = f"makes room for {e.victim_of}" if e.victim_of else CAUSES.get(e.code, e.code)
            return f"{short(e.instance)} is to {goal}: {why}"
        case InstanceUp() as e:
            return f"{short(e.instance)} serves {e.model} after {span(e.took_ms)}, {size(e.bytes_used)} used{_graphs(e)}"
        case InstanceSlept() as e:
            return f"{short(e.instance)} asleep after {span(e.took_ms)}, {size(e.bytes_used)} kept{_instead(e)}"
        case InstanceCheckpointed() as e:
            source = f" from {short(e.image)}" if e.image else ""
            off = f"{short(e.instance)} off its device{source} after {span(e.took_ms)}"
            return f"{off}, {size(e.host_bytes)} of the host{_instead(e)}"
        case ImageRoomFound() as e:
            return f"there is room on disk now for {short(e.instance)}"
        case InstanceSaved() as e:
            return f"{short(e.instance)} saved to {short(e.image)} after {span(e.took_ms)}; no process is left"
        case InstanceEnded() as e:
            return f"{short(e.instance)} ended {f'after {span(e.took_ms)}' if e.took_ms else 'with its node'}"
        case InstanceFailed(code="lost") as e:
            return f"{short(e.instance)} was gone when its worker started"
        case InstanceFailed() as e:
            return f"{short(e.instance)} failed at {e.step or e.rung.value} ({e.code}): {e.message}"
        case InstanceOverdue() as e:
            return f"{short(e.instance)}: nothing heard for {span(e.waited_ms)}: overdue"
        case OperationRequested() as e:
            return f"{e.kind} {e.model or e.instance or ''}".strip()
        case OperationSucceeded() as e:
            note = f": {e.note}" if e.note else f" in {span(e.took_ms)}"
            return f"{e.kind} {e.model or e.instance or ''} done{note}"
        case OperationFailed() as e:
            return f"{e.kind} {e.model or e.instance or ''} failed ({e.code}): {e.message}"
        case _:
            return _of_models(event)


def _graphs(up: InstanceUp) -> str:
    """Of an engine that has any: none captured again is what a wake should say."""
    return f", {up.graphs_again or 'none'} of {up.graphs} CUDA graphs captured again" if up.graphs else ""


def _of_models(event: AnyEvent) -> str:
    match event:
        case ModelRegistered() as e:
            return f"{e.model}, from {ORIGINS.get(e.origin, e.origin)}, engine {e.spec.engine}"
        case ModelRevised() as e:
            told = f"{e.model}, revision {e.revision}: {', '.join(e.fields)}{'' if e.hard else ' (at once)'}"
            return "; ".join(filter(None, (told, note(e))))
        case ModelRetired() as e:
            return "; ".join(filter(None, (f"{e.model} takes no new requests", note(e))))
        case ModelInspected() as e:
            return f"{e.model}: {e.facts.architecture}, {size(e.facts.weight_bytes)} of weights, seen by {e.inspected_by}"
        case ModelRejected() as e:
            return f"{e.model} rejected ({e.code}): {e.message}"
        case ModelSetBack() as e:
            return f"{e.model} backs off after failure {e.failures} ({e.code}): {e.message}"
        case ModelCleared() as e:
            return f"{e.model} may start again"
        case ConfigurationFound() as e:
            return f"{e.engine}, {e.architecture}"
        case SkeletonMeasured() as e:
            return f"a skeleton takes {size(e.size_bytes)}"
        case WeightsStaged() as e:
            read = f"{size(e.read_bytes)} read in {span(e.took_ms)}" if e.read_bytes else "the pool had them"
            return f"{size(e.size_bytes)} for {e.model}: {read}"
        case WeightsDismissed() as e:
            return f"told to leave the pool ({e.code})"
        case WeightsDropped() as e:
            return "gone with its node's pool" if e.code == "left" else f"left the pool ({e.code})"
        case _:
            return _of_images(event)


def _of_images(event: AnyEvent) -> str:
    match event:
        case ImageBuilt() as e:
            proof = f", proved ({e.proof})" if e.proof else ", found on disk"
            return f"{size(e.size_bytes)} for configuration {short(e.configuration)}{proof}"
        case ImageRefused() as e:
            return f"not used ({e.code}): {e.message}"
        case ImageFailed() as e:
            return f"failed at {e.step} ({e.code}): {e.message}"
        case ImageDismissed() as e:
            return f"told to leave the disk ({e.code})"
        case ImagePinned() as e:
            return "pinned: it stays whatever the quota says" if e.pinned else "no longer pinned"
        case ImageRemoved() as e:
            return f"removed ({e.code}{', asked for by ' + e.by if e.by else ''})"
        case _:
            return _of_the_plane(event)


def _instead(e: InstanceSlept | InstanceCheckpointed) -> str:
    """Why it is not where it was to go."""
    return f"; it could not go further ({e.code}): {e.message}" if e.code else ""


def _limits(before: NodeLimits, after: NodeLimits) -> Iterator[str]:
    """What each was, and is."""
    if before.image_quota_bytes != after.image_quota_bytes:
        was, now = (size(one) if one else "half of the disk" for one in (before.image_quota_bytes, after.image_quota_bytes))
        yield f"images may take {now} (was {was})"
    if before.image_pins != after.image_pins:
        was, now = (", ".join(one) or "none" for one in (before.image_pins, after.image_pins))
        yield f"pinned images: {now} (was {was})"
    if before.checkpoint_bytes != after.checkpoint_bytes:
        was, now = (size(n) if n is not None else "any" for n in (before.checkpoint_bytes, after.checkpoint_bytes))
        yield f"engines off their devices may take {now} of the host's memory (was {was})"


def _of_the_plane(event: AnyEvent) -> str:
    match event:
        case ReignBegan() as e:
            return f"decider on {e.host} leads, epoch {e.epoch}"
        case GatewayOpened() as e:
            return f"web on {e.host}, pid {e.pid}"
        case GatewayClosed() as e:
            return f"web closed ({e.code})"
        case SettingsApplied() as e:
            changes = f"{len(e.added)} added, {len(e.revised)} revised, {len(e.retired)} retired"
            limits = f"; {', '.join(e.limits)}" if e.limits else ""
            return f"settings: {changes}, {e.unchanged} unchanged{limits}"
        case NodeLimitsChanged() as e:
            return "; ".join(_limits(e.before, e.after))
        case NodeJoined() as e:
            return f"joined from {e.address}, pool of {size(e.pool_budget_bytes)}"
        case NodeFellSilent():
            return "fell silent; its grants stay granted"
        case NodeHeardAgain():
            return "heard again"
        case NodeLeft():
            return "left in order: no engine is there any more, and no pool"
        case DeviceDeclared() as e:
            return f"{e.name} ({e.kind}), {size(e.size_bytes)}"
        case DeviceWithdrawn():
            return "withdrawn"
        case ForeignMemoryFound() as e:
            whose = [f"pid {one.pid}{f' ({one.name})' if one.name else ''} {size(one.size_bytes)}" for one in e.processes]
            return f"memory of others: {', '.join(whose)}"
        case ForeignMemoryGone():
            return "no memory of others any more"
        case (
            RequestAccepted() | RequestQueued() | RequestRouted() | RequestInterrupted() | RequestFinished() | RequestFailed()
            | RequestCancelled() | GrantGiven() | GrantReturned() | InstanceCreated() | InstanceDirected() | InstanceUp()
            | InstanceSlept() | InstanceCheckpointed() | InstanceSaved() | ImageRoomFound()
            | InstanceEnded() | InstanceFailed() | InstanceOverdue() | OperationRequested()
            | OperationSucceeded() | OperationFailed() | ModelRegistered() | ModelRevised() | ModelRetired() | ModelInspected()
            | ModelRejected() | ModelSetBack() | ModelCleared() | ConfigurationFound() | SkeletonMeasured() | WeightsStaged()
            | WeightsDismissed() | WeightsDropped() | ImageBuilt() | ImageRefused() | ImageFailed() | ImageRemoved()
            | ImageDismissed() | ImagePinned()
        ):  # fmt: skip
            raise AssertionError("said before")
        case _ as unreachable:
            assert_never(unreachable)
