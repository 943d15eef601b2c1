"""`decide(state, command, now) -> events`. Pure: the same arguments always give the same answer."""

from typing import assert_never

from controlplane.commands import (
    Admit,
    ApplySettings,
    BeginReign,
    CancelRequest,
    Checkpoint,
    CloseGateway,
    EndRequests,
    Farewell,
    Hello,
    Interrupt,
    Load,
    Move,
    NodeHeard,
    NodeSilent,
    OpenGateway,
    Order,
    PinImage,
    RebuildImage,
    RegisterModel,
    RemoveImage,
    ReportCheckpointed,
    ReportDropped,
    ReportEnded,
    ReportFailed,
    ReportForeign,
    ReportImageBuilt,
    ReportImageFailed,
    ReportImageRefused,
    ReportImageRemoved,
    ReportImageRoom,
    ReportModel,
    ReportSaved,
    ReportSlept,
    ReportStaged,
    ReportUnusable,
    ReportUp,
    RetireModel,
    Retry,
    ReviseModel,
    Save,
    Sleep,
    Stop,
    Tick,
)
from controlplane.decisions import admission, images, lifecycle, membership, moves, operations, registry, timers, weightsets
from controlplane.decisions.draft import Decision, Draft
from controlplane.fleet.state import Fleet


def decide(fleet: Fleet, order: Order, now_ms: int) -> Decision:  # noqa: PLR0915 - one case per command
    """Answer a command.

    Args:
        fleet: the committed state. now_ms: Unix milliseconds.

    Returns: the events to append (none: a no-op) and the fleet after them.

    Raises: Refused, with nothing to append.
    """
    draft = Draft(fleet, order, now_ms)
    match order.body:
        case Admit() as command:
            admission.admit(draft, command)
        case EndRequests() as command:
            admission.end_requests(draft, command)
        case Tick() as command:
            timers.tick(draft, command)
        case Interrupt() as command:
            admission.interrupt(draft, command)
        case CancelRequest() as command:
            admission.cancel_request(draft, command)
        case ReportUp() as command:
            lifecycle.up(draft, command)
        case ReportSlept() as command:
            lifecycle.slept(draft, command)
        case ReportCheckpointed() as command:
            lifecycle.checkpointed(draft, command)
        case ReportSaved() as command:
            lifecycle.saved(draft, command)
        case ReportImageBuilt() as command:
            images.built(draft, command)
        case ReportImageRefused() as command:
            images.refused(draft, command)
        case ReportImageFailed() as command:
            images.failed(draft, command)
        case ReportImageRemoved() as command:
            images.removed(draft, command)
        case ReportImageRoom() as command:
            images.room_found(draft, command)
        case ReportEnded() as command:
            lifecycle.ended(draft, command)
        case ReportFailed() as command:
            lifecycle.failed(draft, command)
        case ReportStaged() as command:
            weightsets.staged(draft, command)
        case ReportDropped() as command:
            weightsets.dropped(draft, command)
        case ReportForeign() as command:
            membership.foreign_memory(draft, command)
        case Load() as command:
            operations.load(draft, command)
        case Sleep() as command:
            operations.sleep(draft, command)
        case Checkpoint() as command:
            operations.checkpoint(draft, command)
        case Save() as command:
            operations.save(draft, command)
        case Move() as command:
            moves.move(draft, command)
        case Stop() as command:
            operations.stop(draft, command)
        case Retry() as command:
            operations.retry(draft, command)
        case RemoveImage() as command:
            images.dismiss(draft, command)
        case RebuildImage() as command:
            images.rebuild(draft, command)
        case PinImage() as command:
            images.pin(draft, command)
        case RegisterModel() as command:
            registry.register(draft, command)
        case ReviseModel() as command:
            registry.revise(draft, command)
        case RetireModel() as command:
            registry.retire(draft, command)
        case ApplySettings() as command:
            registry.apply_settings(draft, command)
        case ReportModel() as command:
            registry.inspected(draft, command)
        case ReportUnusable() as command:
            registry.unusable(draft, command)
        case Hello() as command:
            membership.hello(draft, command)
        case Farewell() as command:
            membership.farewell(draft, command)
        case NodeSilent() as command:
            membership.node_silent(draft, command)
        case NodeHeard() as command:
            membership.node_heard(draft, command)
        case OpenGateway() as command:
            membership.open_gateway(draft, command)
        case CloseGateway() as command:
            membership.close_gateway(draft, command)
        case BeginReign() as command:
            membership.begin_reign(draft, command)
        case _ as unreachable:
            assert_never(unreachable)
    return draft.decision()
