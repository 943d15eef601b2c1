"""The head of every page: how this process stands to the log, and the nodes."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from controlplane.fleet import Fleet
from controlplane.subjects import NodeBeat
from web.views.standing import away


class Link(StrEnum):
    """How this web process stands to the log."""

    LIVE = "live"
    LAGGING = "lagging"
    """Connected, but even the nodes' beats have stopped coming, or events that are known to be written do not come."""
    DISCONNECTED = "disconnected"
    PAST = "past"
    """What is shown is long over, however it stands."""


class NodeView(msgspec.Struct, frozen=True):
    node: str
    away: str
    """As in `standing.away`."""
    version: str
    pool_ok: bool


class PlaneHead(msgspec.Struct, frozen=True, kw_only=True):
    tone: str
    """`up`, `climb` (lagging), `failed` (disconnected) or `sleep` (the past)."""
    words: str
    position: int
    epoch: int
    nodes: tuple[NodeView, ...]
    running: int
    waiting: int


def plane(fleet: Fleet, beats: Mapping[str, NodeBeat], link: Link) -> PlaneHead:
    match link:
        case Link.LIVE:
            tone, words = "up", "live"
        case Link.LAGGING:
            tone, words = "climb", "lagging: what happens is not heard"
        case Link.DISCONNECTED if fleet.position:
            tone, words = "failed", "disconnected from the log"
        case Link.DISCONNECTED:
            tone, words = "climb", "connecting to the log"
        case Link.PAST:
            tone, words = "sleep", "the past"
    running = sum(request.instance is not None for request in fleet.requests.values())
    nodes = (
        NodeView(n.node, away(n), n.version, beats[n.node].pool_ok if n.node in beats else True)
        for n in sorted(fleet.nodes.values(), key=lambda n: n.node)
    )
    return PlaneHead(
        tone=tone, words=words, position=fleet.position, epoch=fleet.epoch, nodes=tuple(nodes), running=running,
        waiting=len(fleet.requests) - running,
    )  # fmt: skip
