"""Who asks, and for what: gateways, their open requests, operators' open operations. Times as in `members`."""

import msgspec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """An open request. Finished ones are in the log alone."""

    request: str
    model: str
    gateway: str
    kind: str
    streamed: bool
    prompt_bytes: int
    max_tokens: int | None
    accepted_ms: int
    order: int
    """Position of its acceptance: first come, first served."""
    instance: str | None = None
    """Where it runs; None while queued."""
    grant: int | None = None
    routed_ms: int | None = None
    attempts: int = 0
    code: str = ""
    reason: str = ""
    queued_ms: int = 0
    """When it was told why it waits, last."""
    lease_on: str | None = None
    """The instance that climbs, or climbed, for it."""
    failed_climbs: int = 0
    """Climbs of its model that failed while it waited."""
    lost_ms: int | None = None
    """When the instance it runs on went away; its gateway's word is awaited."""
    interrupted_on: str | None = None
    """The instance that lost it, and when; not tried again at once."""
    interrupted_ms: int = 0


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An open operation."""

    operation: str
    kind: str
    model: str | None
    instance: str | None
    requested_ms: int
    actor: str
    device: str | None = None
    order: int = 0
    """Position of its request: it waits among the requests by it."""


class Gateway(msgspec.Struct, frozen=True, kw_only=True):
    gateway: str
    host: str
    pid: int
    opened_ms: int
