"""Commands of the desk: time, and what it infers from silence."""

import msgspec


class Tick(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Time has passed: idle descents, ends of back-offs, queue deadlines, watchdogs.

    `since_ms` (Unix milliseconds): since when nodes and gateways could be heard. Whoever has to do or say something in time
    has the full time from then on, as nobody could have known of it before.
    """

    since_ms: int = 0


class NodeSilent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str


class NodeHeard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str


class BeginReign(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First command of a new leader."""

    host: str
    pid: int
    epoch: int
