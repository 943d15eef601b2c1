"""Commands of the desk: time, and what it infers from silence."""

import msgspec


class Tick(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Time has passed: idle descents, ends of back-offs, queue deadlines, watchdogs."""


class NodeSilent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str


class NodeHeard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str


class BeginReign(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First command of a new leader."""

    host: str
    pid: int
    epoch: int
