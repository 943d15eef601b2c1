"""What events mean for the weight sets in the nodes' pools."""

from msgspec.structs import replace

from controlplane.events import WeightsDismissed, WeightsDropped, WeightsStaged
from controlplane.fleet.members import WeightSet
from controlplane.fleet.state import Fleet


def staged(fleet: Fleet, e: WeightsStaged, at: int) -> Fleet:
    known = fleet.weights.get(_key(e.node, e.weight_set))
    models = (*(known.models if known else ()), (e.model, e.revision))
    found = WeightSet(
        weight_set=e.weight_set, node=e.node, size_bytes=e.size_bytes, models=tuple(dict.fromkeys(models)), used_ms=at
    )  # fmt: skip
    return _with(fleet, found)


def dismissed(fleet: Fleet, e: WeightsDismissed) -> Fleet:
    return _with(fleet, replace(fleet.weights[_key(e.node, e.weight_set)], dismissed=True))


def dropped(fleet: Fleet, e: WeightsDropped) -> Fleet:
    return replace(fleet, weights=fleet.weights.delete(_key(e.node, e.weight_set)))


def used(fleet: Fleet, node: str, weight_set: str, at: int) -> Fleet:
    """An instance has come up with it; of a gang each rank with its own."""
    for part in parts(weight_set):
        if (known := fleet.weights.get(_key(node, part))) is not None:
            fleet = _with(fleet, replace(known, used_ms=at))
    return fleet


def parts(weight_set: str | None) -> tuple[str, ...]:
    """The sets that an instance has mapped: its own, or those of its ranks, which a `+` joins."""
    return tuple(weight_set.split("+")) if weight_set else ()


def _with(fleet: Fleet, found: WeightSet) -> Fleet:
    return replace(fleet, weights=fleet.weights.set(_key(found.node, found.weight_set), found))


def _key(node: str, weight_set: str) -> str:
    return f"{node}/{weight_set}"
