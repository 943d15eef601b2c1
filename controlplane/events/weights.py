"""Events of weight sets: content-addressed bytes in a node's host pool."""

from controlplane.events.record import Event


class WeightsStaged(Event, frozen=True, kw_only=True):
    """A model's weights are in the node's pool, digested."""

    AGGREGATE, KEY = "weights", "weight_set"
    node: str
    weight_set: str
    model: str
    revision: int
    size_bytes: int
    took_ms: int
    read_bytes: int = 0
    """Bytes read from storage; 0 when the pool already held the set."""


class WeightsDismissed(Event, frozen=True, kw_only=True):
    """The decider named this set to leave the pool, to make room or because its model is gone."""

    AGGREGATE, KEY = "weights", "weight_set"
    node: str
    weight_set: str
    code: str
    """`room` or `retired`."""
    need_bytes: int = 0


class WeightsDropped(Event, frozen=True, kw_only=True):
    """The node's pool no longer holds the set. (The stream goes on: the same bytes may be staged again.)"""

    AGGREGATE, KEY = "weights", "weight_set"
    node: str
    weight_set: str
    code: str
    """`dismissed`, `lost` (not found in the pool any more), `corrupt`, or `left` (the pool has ended with its node's plane)."""
