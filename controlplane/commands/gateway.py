"""Commands of gateways (web processes): their own life, and the requests that they hold for callers."""

from typing import Literal

import msgspec


class OpenGateway(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A web process starts; an earlier gateway of the same host is gone, and its requests end."""

    gateway: str
    host: str
    pid: int


class CloseGateway(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It stops in order (`stopped`), or the desk found it silent (`silent`)."""

    gateway: str
    code: Literal["stopped", "silent"]


class Admit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A caller's request. Answer: `Routed` or `Queued`."""

    request: str
    model: str
    """Name or alias, as the caller wrote it."""
    gateway: str
    kind: Literal["chat", "completion"]
    streamed: bool
    prompt_bytes: int
    max_tokens: int | None = None
    body_sha256: str = ""
    wait: bool = True
    """False: refuse with `busy` instead of queueing when it can't run at once."""


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How one request ended, as its gateway saw it."""

    request: str
    outcome: Literal["finished", "failed", "cancelled"]
    finish_reason: str = ""
    """`stop` or `length` when finished."""
    code: str = ""
    message: str = ""
    by: Literal["caller", "operator", "gateway"] = "caller"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_at_ms: int | None = None
    """Unix milliseconds."""


class EndRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ends are sent in batches, off the critical path. An end of a request that has ended already changes nothing."""

    ends: tuple[End, ...]


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The instance of a running request was lost. Nothing sent and first attempt: it is queued again
    (answer `Routed` or `Queued`); else it fails (answer `Done`)."""

    request: str
    attempt: int
    """The attempt that was lost; an interrupt of an older one changes nothing."""
    sent_chars: int
    code: str
    message: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An operator cancels a request by id. Its gateway sees the event and aborts it in the engine."""

    request: str
