"""The host's ledger beside the pool: what engines take that are off their devices, and what they may."""

from collections.abc import Mapping

import msgspec

from controlplane.fleet import Fleet
from controlplane.rungs import Rung
from controlplane.subjects import NodeBeat


class HostView(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a node's memory."""

    checkpointed_bytes: int
    """What engines at `checkpoint` take, as last measured."""
    checkpoint_bytes: int | None
    """What they may, all together; None: no limit was said."""
    available_bytes: int | None
    """What the host can still give; None: not said."""


def host(fleet: Fleet, beats: Mapping[str, NodeBeat], node: str) -> HostView:
    beat = beats.get(node)
    measured = {one.instance: one.host_bytes for one in beat.instances if one.host_bytes} if beat else {}
    off = [i for i in fleet.instances.values() if i.node == node and i.rung is Rung.CHECKPOINT]
    return HostView(
        checkpointed_bytes=sum(measured.get(i.instance, i.host_bytes) for i in off),
        checkpoint_bytes=fleet.nodes[node].checkpoint_bytes,
        available_bytes=(beat.host_available_bytes or None) if beat else None,
    )
