"""Events of requests. Each accepted one ends exactly once: finished, failed or cancelled."""

from controlplane.events.record import Event


class RequestAccepted(Event, frozen=True, kw_only=True):
    AGGREGATE, KEY = "request", "request"
    request: str
    model: str
    """The model's own name, aliases resolved."""
    gateway: str
    kind: str
    """`chat` or `completion`."""
    streamed: bool
    prompt_bytes: int
    max_tokens: int | None = None
    body_sha256: str = ""


class RequestQueued(Event, frozen=True, kw_only=True):
    """It has to wait: for what, why, behind how many."""

    AGGREGATE, KEY = "request", "request"
    request: str
    model: str
    code: str
    """`climbing`, `slot_busy`, `descending`, `backing_off`, `node_silent`, `reopened` ..."""
    reason: str
    place: int
    """1 = next."""


class RequestRouted(Event, frozen=True, kw_only=True):
    """It may run: there, under that grant."""

    AGGREGATE, KEY = "request", "request"
    request: str
    model: str
    instance: str
    runs_on: str
    """The node."""
    grant: int
    endpoint: str
    attempt: int = 1


class RequestInterrupted(Event, frozen=True, kw_only=True):
    """Its instance was lost before anything had been sent to the caller; it is queued again, once."""

    AGGREGATE, KEY = "request", "request"
    request: str
    model: str
    instance: str
    code: str


class _Ended(Event, frozen=True, kw_only=True):
    AGGREGATE, KEY, ENDS = "request", "request", True
    request: str
    model: str
    kind: str
    streamed: bool
    accepted_ms: int
    """Unix milliseconds of acceptance."""
    instance: str | None = None
    attempts: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    queued_ms: int = 0
    """From acceptance to the (last) routing."""
    first_token_ms: int | None = None
    """From acceptance to the first token sent."""
    took_ms: int = 0


class RequestFinished(_Ended, frozen=True, kw_only=True):
    finish_reason: str
    """`stop` or `length`."""


class RequestFailed(_Ended, frozen=True, kw_only=True):
    code: str
    message: str


class RequestCancelled(_Ended, frozen=True, kw_only=True):
    by: str
    """`caller`, `operator` or `gateway` (the web process that held the connection is gone)."""
    phase: str
    """`queued`, `climbing` or `running`."""
