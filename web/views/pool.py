"""Each node's host pool: how full it is, which weight sets it holds, and for whom. And the skeletons that sleep there."""

from collections.abc import Mapping

import msgspec

from controlplane.fleet import Fleet
from controlplane.fleet.images import idle_pins
from controlplane.rungs import Rung
from controlplane.subjects import NodeBeat
from web.views.figures import percent
from web.views.hostmemory import host
from web.views.hues import hues
from web.views.images import ImageView, images, off_disk


class SetView(msgspec.Struct, frozen=True, kw_only=True):
    weight_set: str
    size_bytes: int
    models: tuple[str, ...]
    stale: tuple[str, ...]
    """Models whose older revision these bytes were."""
    used_ms: int
    mapped: bool
    leaving: bool
    width: float
    """Percent of the budget."""


class SleeperView(msgspec.Struct, frozen=True, kw_only=True):
    instance: str
    model: str
    hue: int
    bytes_used: int
    since_ms: int
    words: str = "asleep"
    """`off its device`: the bytes are the host's."""
    why: str = ""
    """It is not on disk, where it was to go."""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    used_bytes: int
    budget_bytes: int
    width: float
    ok: bool
    off_bytes: int
    """Memory of the host that engines off their devices take."""
    off_limit_bytes: int | None
    """What they may; what the host can still give is left out: it changes all the time, and pages are painted anew for it."""
    measured: bool
    """False: no beat yet; `used_bytes` is the sum of the sets."""
    sets: tuple[SetView, ...]
    sleepers: tuple[SleeperView, ...]
    images: tuple[ImageView, ...] = ()
    no_images: str = ""
    image_bytes: int = 0
    image_quota_bytes: int = 0
    """0: the settings give none."""
    notes: tuple[str, ...] = ()
    """Pins in the settings that pin nothing."""


def pools(fleet: Fleet, beats: Mapping[str, NodeBeat]) -> tuple[PoolView, ...]:
    return tuple(_pool(fleet, beats, node) for node in sorted(fleet.nodes))


def _pool(fleet: Fleet, beats: Mapping[str, NodeBeat], node: str) -> PoolView:
    beat, off = beats.get(node), host(fleet, beats, node)
    held = sorted((w for w in fleet.weights.values() if w.node == node), key=lambda w: (-w.used_ms, w.weight_set))
    budget = beat.pool_budget_bytes if beat else fleet.nodes[node].pool_budget_bytes
    used = beat.pool_used_bytes if beat else sum(w.size_bytes for w in held)
    mapped = {i.weight_set for i in fleet.instances.values() if i.node == node}
    sets = []
    for w in held:
        current = tuple(m for m, revision in w.models if m in fleet.models and fleet.models[m].revision == revision)
        stale = tuple(dict.fromkeys(m for m, _ in w.models if m not in current))
        sets.append(
            SetView(
                weight_set=w.weight_set,
                size_bytes=w.size_bytes,
                models=current,
                stale=stale,
                used_ms=w.used_ms,
                mapped=w.weight_set in mapped,
                leaving=w.dismissed,
                width=percent(w.size_bytes, budget),
            )
        )
    return PoolView(
        node=node, used_bytes=used, budget_bytes=budget, width=percent(used, budget), ok=beat.pool_ok if beat else True,
        off_bytes=off.checkpointed_bytes, off_limit_bytes=off.checkpoint_bytes,
        measured=beat is not None, sets=tuple(sets), sleepers=_sleepers(fleet, node),
        images=images(fleet, node), no_images=fleet.nodes[node].no_images,
        image_bytes=sum(i.size_bytes for i in fleet.images.values() if i.node == node),
        image_quota_bytes=fleet.nodes[node].image_quota_bytes, notes=idle_pins(fleet, fleet.nodes[node].image_pins),
    )  # fmt: skip


def _sleepers(fleet: Fleet, node: str) -> tuple[SleeperView, ...]:
    tints = hues(fleet)
    low = (Rung.SLEEP, Rung.CHECKPOINT)
    asleep = [i for i in fleet.instances.values() if i.node == node and i.rung in low and i.grant is None]
    return tuple(
        SleeperView(
            instance=i.instance,
            model=i.model or "no model",
            hue=tints.get(i.configuration, 0),
            bytes_used=i.bytes_used or i.host_bytes,
            since_ms=i.since_ms,
            words="asleep" if i.rung is Rung.SLEEP else "off its device",
            why=off_disk(fleet, i),
        )
        for i in sorted(asleep, key=lambda i: (i.since_ms, i.instance))
    )
