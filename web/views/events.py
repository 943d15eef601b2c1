"""Events as rows: a tone, a sentence for people, and the whole as JSON for those who want it."""

import msgspec

from controlplane.envelope import Recorded, to_wire
from web.views.devicenames import Names, stream_words, told

BAD = frozenset({
    "ModelRejected", "ModelSetBack", "InstanceFailed", "InstanceOverdue", "RequestFailed", "OperationFailed", "NodeFellSilent",
})  # fmt: skip
GOOD = frozenset({"InstanceUp", "RequestFinished", "OperationSucceeded", "NodeHeardAgain", "ModelCleared"})


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    position: int
    at_ms: int
    type: str
    stream: str
    stream_words: str
    """As people read it: with a device's name, not its id."""
    aggregate: str
    text: str
    tone: str
    operation: str | None
    because: int | None
    actor: str


def row(recorded: Recorded, devices: Names) -> EventRow:
    name = recorded.type
    return EventRow(
        position=recorded.position, at_ms=recorded.at_ms, type=name, stream=recorded.stream,
        stream_words=stream_words(recorded.stream, devices), aggregate=recorded.event.AGGREGATE,
        text=told(recorded.event, devices),
        tone="bad" if name in BAD else "good" if name in GOOD else "plain", operation=recorded.operation,
        because=recorded.because, actor=recorded.actor,
    )  # fmt: skip


def document(recorded: Recorded) -> str:
    """The event as it travels, indented."""
    return msgspec.json.format(to_wire(recorded), indent=2).decode()
