"""The envelope: the columns of table `event` and the JSON on NATS are the same thing."""

import re
from datetime import UTC, datetime
from typing import Any

import msgspec

from controlplane.events import BY_NAME, AnyEvent
from controlplane.upcast import upcast


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its place in the log.

    `position` counts from 1 without gaps over the whole log, `version` likewise within the stream.
    `command`/`ordinal` name the command that produced it and its place among that command's events.
    `because` is the position of the event that led to it; `at_ms` is Unix milliseconds (UTC).
    """

    position: int
    stream: str
    version: int
    at_ms: int
    command: str
    ordinal: int
    event: AnyEvent
    operation: str | None = None
    because: int | None = None
    actor: str = ""
    """`node:n1`, `operator:<token name>`, `gateway:<id>`, `desk`."""
    trace: str | None = None

    @property
    def type(self) -> str:
        return type(self.event).__name__

    @property
    def node(self) -> str | None:
        """The node whose worker must see this event, if any."""
        return getattr(self.event, "node", None)


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """A `Recorded` as it is stored and sent; `data` is the event's fields as raw JSON."""

    position: int
    stream: str
    version: int
    type: str
    v: int
    at: datetime
    command: str
    ordinal: int
    operation: str | None = None
    because: int | None = None
    actor: str = ""
    trace: str | None = None
    data: msgspec.Raw


_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")
"""The escape itself, and not a backslash that is followed by such a text."""
_encoder = msgspec.json.Encoder()
_wire_decoder = msgspec.json.Decoder(Wire)
_decoders: dict[str, msgspec.json.Decoder[Any]] = {name: msgspec.json.Decoder(kind) for name, kind in BY_NAME.items()}


def decode_event(name: str, v: int, data: bytes | msgspec.Raw | str) -> AnyEvent:
    """Rebuild an event of any stored version. Raises `upcast.UnknownEvent` for a type that this release does not know."""
    kind = BY_NAME.get(name)
    if kind is None or v != kind.V:
        name, data = upcast(name, v, data.encode() if isinstance(data, str) else bytes(data))
    event: AnyEvent = _decoders[name].decode(data)
    return event


def without_nul(encoded: bytes) -> bytes:
    """JSON with U+FFFD in the place of NUL, which Postgres holds in no text: an engine's last words may have one."""
    return _NUL.sub(rb"\1\\ufffd", encoded) if b"\\u0000" in encoded else encoded


def encode_event(event: AnyEvent) -> bytes:
    return _encoder.encode(event)


def to_wire(recorded: Recorded) -> bytes:
    """Encode for NATS."""
    return _encoder.encode(
        Wire(
            position=recorded.position, stream=recorded.stream, version=recorded.version, type=recorded.type,
            v=recorded.event.V, at=datetime.fromtimestamp(recorded.at_ms / 1000, UTC), command=recorded.command,
            ordinal=recorded.ordinal, operation=recorded.operation, because=recorded.because, actor=recorded.actor,
            trace=recorded.trace, data=msgspec.Raw(encode_event(recorded.event)),
        )
    )  # fmt: skip


def from_wire(payload: bytes) -> Recorded:
    """Decode what `to_wire` made."""
    wire = _wire_decoder.decode(payload)
    return Recorded(
        position=wire.position, stream=wire.stream, version=wire.version, at_ms=round(wire.at.timestamp() * 1000),
        command=wire.command, ordinal=wire.ordinal, operation=wire.operation, because=wire.because, actor=wire.actor,
        trace=wire.trace, event=decode_event(wire.type, wire.v, wire.data),
    )  # fmt: skip
