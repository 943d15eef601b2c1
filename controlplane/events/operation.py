"""Events of operations: what an operator asked for, until it is done or has failed."""

from controlplane.events.record import Event


class OperationRequested(Event, frozen=True, kw_only=True):
    AGGREGATE, KEY = "operation", "operation"
    operation: str
    kind: str
    """`load`, `sleep`, `checkpoint`, `save`, `stop`, `retry` or `move`."""
    model: str | None = None
    instance: str | None = None
    device: str | None = None
    """Where a `move` goes."""


class OperationSucceeded(Event, frozen=True, kw_only=True):
    AGGREGATE, KEY, ENDS = "operation", "operation", True
    operation: str
    kind: str
    model: str | None = None
    instance: str | None = None
    took_ms: int = 0
    note: str = ""
    """E.g. `was up already`: a no-op says so."""


class OperationFailed(Event, frozen=True, kw_only=True):
    AGGREGATE, KEY, ENDS = "operation", "operation", True
    operation: str
    kind: str
    model: str | None = None
    instance: str | None = None
    code: str
    message: str
