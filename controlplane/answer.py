"""Answers: a pure function of the events that a command produced, so a repeated command gets its first answer from the log."""

from collections.abc import Sequence

import msgspec

from controlplane.envelope import Recorded
from controlplane.events import (
    AnyEvent,
    ModelRetired,
    ModelRevised,
    OperationRequested,
    RequestCancelled,
    RequestFailed,
    RequestQueued,
    RequestRouted,
)
from controlplane.refusal import Refusal


class Routed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    position: int
    request: str
    instance: str
    node: str
    endpoint: str
    grant: int
    attempt: int
    model: str


class Queued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    position: int
    request: str
    code: str
    reason: str
    place: int


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    position: int
    operation: str


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`position` is that of the command's last event; 0: nothing had to change."""

    position: int
    note: str = ""
    """What whoever asked should know of it, and can do."""


Answer = Routed | Queued | Opened | Done
Reply = Routed | Queued | Opened | Done | Refusal


def answer(events: Sequence[Recorded]) -> Answer:
    """Return the answer to the command that produced `events` (in order; empty: it was a no-op).

    The subject of the command is the first event's; later events (other requests routed in the same decision) don't count.
    """
    if not events:
        return Done(position=0)
    last = events[-1].position
    subject = getattr(events[0].event, "request", None)
    for recorded in reversed(events):
        match recorded.event:
            case OperationRequested(operation=operation):
                return Opened(position=last, operation=operation)
            case RequestRouted() as routed if routed.request == subject:
                return Routed(
                    position=last, request=routed.request, instance=routed.instance, node=routed.runs_on,
                    endpoint=routed.endpoint, grant=routed.grant, attempt=routed.attempt, model=routed.model,
                )  # fmt: skip
            case RequestQueued() as queued if queued.request == subject:
                return Queued(position=last, request=queued.request, code=queued.code, reason=queued.reason, place=queued.place)
            case RequestFailed() | RequestCancelled():
                continue
            case _:
                continue
    return Done(position=last, note=" ".join(filter(None, (note(one.event) for one in events))))


def note(event: AnyEvent) -> str:
    """What is to be known of an event beside that it happened; empty: nothing."""
    match event:
        case ModelRetired(model=model, over_settings=True):
            return (
                f"{model} is in the settings file still, and comes back when that is applied next (at the next start of "
                "`enginehouse up`, or when the file changes): take its [[model]] table out of the file"
            )
        case ModelRevised(model=model, over_settings=True):
            return (
                f"{model} is in the settings file, and what that says of it counts again when it is applied next (at the next "
                "start of `enginehouse up`, or when the file changes): write it there, too"
            )
        case _:
            return ""
