"""The slot map: each device's eight cells, who holds which run of them, and whose bytes fill it."""

from collections.abc import Mapping, Sequence

import msgspec

from controlplane.fleet import Device, Fleet, Grant
from controlplane.spec import CELLS
from controlplane.subjects import DeviceBytes, NodeBeat
from web.views.figures import percent, rate, share, size
from web.views.hues import hues
from web.views.standing import Standing, away, beat_of, shown_model, standing


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A granted run of cells."""

    offset: int
    cells: int
    instance: str
    model: str
    hue: int
    standing: Standing
    running: int
    tokens_per_s: float
    bytes_used: int
    grant: int
    place: str
    """Which rank of a gang this is, or that it moves here; else empty."""
    label: str
    """All of it as one sentence, for those who do not see the drawing."""


class Free(msgspec.Struct, frozen=True, kw_only=True):
    """A free node of the buddy tree: the largest grant that fits there."""

    offset: int
    cells: int
    size_bytes: int


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the bar of bytes; `left` and `width` in percent of the device."""

    kind: str
    words: str
    size_bytes: int
    left: float
    width: float


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    name: str
    node: str
    kind: str
    size_bytes: int
    away: str
    """Of its node, as in `standing.away`."""
    runs: tuple[Held | Free, ...]
    segments: tuple[Segment, ...]
    granted_cells: int


def free_runs(taken: set[int]) -> list[tuple[int, int]]:
    """Split what is not `taken` into the largest aligned runs (offset, cells): the free nodes of the buddy tree."""

    def split(offset: int, cells: int) -> list[tuple[int, int]]:
        held = taken.intersection(range(offset, offset + cells))
        if not held:
            return [(offset, cells)]
        if len(held) == cells:
            return []
        half = cells // 2
        return split(offset, half) + split(offset + half, half)

    return split(0, CELLS)


def devices(fleet: Fleet, beats: Mapping[str, NodeBeat]) -> tuple[DeviceView, ...]:
    """Every device, by node and name."""
    grants: dict[str, list[Grant]] = {}
    for grant in fleet.grants.values():
        grants.setdefault(grant.device, []).append(grant)
    tints = hues(fleet)
    ordered = sorted(fleet.devices.values(), key=lambda d: (d.node, d.name, d.device))
    return tuple(_device(fleet, beats, device, grants.get(device.device, []), tints) for device in ordered)


def _device(
    fleet: Fleet, beats: Mapping[str, NodeBeat], device: Device, grants: list[Grant], tints: Mapping[str, int]
) -> DeviceView:
    held = [run for grant in grants if (run := _held(fleet, beats, grant, device, tints)) is not None]
    taken = {cell for grant in grants for cell in range(grant.offset, grant.offset + grant.cells)}
    free = [Free(offset=o, cells=n, size_bytes=device.size_bytes * n // CELLS) for o, n in free_runs(taken)]
    runs: list[Held | Free] = [*held, *free]
    node = fleet.nodes.get(device.node)
    return DeviceView(
        device=device.device, name=device.name, node=device.node, kind=device.kind, size_bytes=device.size_bytes,
        away=away(node), runs=tuple(sorted(runs, key=lambda run: run.offset)),
        segments=_segments(fleet, beats, device, held), granted_cells=len(taken),
    )  # fmt: skip


def _held(fleet: Fleet, beats: Mapping[str, NodeBeat], grant: Grant, device: Device, tints: Mapping[str, int]) -> Held | None:
    instance = fleet.instances.get(grant.instance)
    if instance is None:
        return None
    stands, beat, model = standing(fleet, beats, instance), beat_of(beats, instance), shown_model(instance) or "no model"
    comes = grant.number == instance.moving_to  # until it serves here, all that it has is where it moves from
    speed, running = (beat.tokens_per_s if beat else 0.0, instance.running) if not comes else (0.0, 0)
    words = [f"{model} on {share(grant.cells)} of {device.name}", stands.words]
    ranks = max(1, len(instance.gang))
    if ranks > 1:
        words.append(f"rank {grant.rank} of a gang of {ranks}")
    if comes:
        words.append("moves here")
    if stands.progress is not None and stands.progress.total:
        words.append(f"{stands.progress.step} {percent(stands.progress.done, stands.progress.total):.0f} %")
    if running:
        words.append(f"{running} running" + (f", {rate(speed)} tokens a second" if beat else ""))
    return Held(
        offset=grant.offset, cells=grant.cells, instance=instance.instance, model=model,
        hue=tints.get(instance.configuration, 0), standing=stands, running=running, tokens_per_s=speed,
        bytes_used=0 if comes else (beat.bytes_used if beat and beat.bytes_used else instance.bytes_used) // ranks,
        grant=grant.number, place=f"rank {grant.rank} of {ranks}" if ranks > 1 else "moves here" if comes else "",
        label=", ".join(words),
    )  # fmt: skip


def _segments(fleet: Fleet, beats: Mapping[str, NodeBeat], device: Device, held: list[Held]) -> tuple[Segment, ...]:
    """Mapped weights and private bytes of the holders (as reported), other measured bytes, and what is left."""
    beat = beats.get(device.node)
    if beat is not None and (owners := beat.owners.get(device.device)) is not None:
        return _drawn(_owned(owners, device), device.size_bytes)
    mapped = private = 0
    for run in held:
        instance = fleet.instances[run.instance]
        if run.grant == instance.moving_to:
            continue
        weights = instance.bytes_mapped // max(1, len(instance.gang))
        mapped += weights
        private += max(run.bytes_used - weights, 0)
    measured = beat.device_bytes.get(device.device) if beat else None
    own = (("mapped", "mapped weights", mapped), ("private", "private", private))
    if measured is None:
        return _drawn(own, device.size_bytes, rest="not measured")
    others = max(measured - mapped - private, 0)
    return _drawn((*own, ("others", "sleepers and others", others)), device.size_bytes)


def _owned(owners: DeviceBytes, device: Device) -> tuple[tuple[str, str, int], ...]:
    """A GPU's, whose driver tells processes apart."""
    names = {one.pid: f" {one.name}" for one in device.foreign if one.name}
    pids = ", ".join(f"pid {pid}{names.get(pid, '')}" for pid, _ in sorted(owners.foreign.items(), key=lambda one: -one[1]))
    others = ("foreign", f"not this plane's ({pids})", sum(owners.foreign.values()))
    return (
        ("mapped", "weights", owners.pool_sets),
        ("private", f"skeletons {size(owners.skeletons)} and KV", owners.skeletons + owners.kv + owners.own_weights),
        ("others", "pool's context and driver", owners.pool_context + owners.driver),
        *([others] if owners.foreign else []),
    )


def _drawn(parts: Sequence[tuple[str, str, int]], whole: int, rest: str = "free") -> tuple[Segment, ...]:
    free = max(whole - sum(amount for _, _, amount in parts), 0)
    segments, left = [], 0.0
    for kind, words, amount in (*parts, ("free", rest, free)):
        width = min(percent(amount, whole), 100 - left)
        segments.append(Segment(kind=kind, words=words, size_bytes=amount, left=round(left, 2), width=round(width, 2)))
        left += width
    return tuple(segments)


def described(view: DeviceView) -> str:
    """The bar of bytes as a sentence."""
    return f"Bytes on {view.name}: " + ", ".join(f"{s.words} {size(s.size_bytes)}" for s in view.segments)


def layout(view: DeviceView) -> object:
    """What decides how a device's cells lie; who holds a run, and how full the device is, is drawn by itself."""
    runs = tuple(r.grant if isinstance(r, Held) else (r.offset, r.cells) for r in view.runs)
    return (view.name, view.node, view.kind, view.size_bytes, view.away, view.granted_cells, runs)
