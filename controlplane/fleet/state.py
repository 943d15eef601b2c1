"""The fleet: everything a decision may look at. Persistent maps, so an older state stays valid and costs nothing to keep."""

from typing import Any, TypeVar

import msgspec
from immutables import Map

from controlplane.fleet.callers import Gateway, Operation, Request
from controlplane.fleet.members import Configuration, Image, Instance, Model, WeightSet
from controlplane.fleet.places import Device, Grant, Node

EVOLVE_VERSION = 13
"""Bumped whenever `evolve` or a record changes meaning: snapshots of another version are ignored and rebuilt."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Keyed by each record's own id (`grants` by number, `aliases` alias -> model, `weights` by `node/weight_set`).

    `versions` holds the last version of every stream that has not ended. `waiting` is an index over `requests`:
    model -> ids of its requests that are not routed, in the order of their acceptance (no entry when there are none).
    """

    position: int = 0
    epoch: int = 0
    settings_digest: str = ""
    nodes: "Map[str, Node]" = Map()
    devices: "Map[str, Device]" = Map()
    grants: "Map[int, Grant]" = Map()
    configurations: "Map[str, Configuration]" = Map()
    models: "Map[str, Model]" = Map()
    aliases: "Map[str, str]" = Map()
    weights: "Map[str, WeightSet]" = Map()
    instances: "Map[str, Instance]" = Map()
    images: "Map[str, Image]" = Map()
    requests: "Map[str, Request]" = Map()
    waiting: "Map[str, tuple[str, ...]]" = Map()
    operations: "Map[str, Operation]" = Map()
    gateways: "Map[str, Gateway]" = Map()
    versions: "Map[str, int]" = Map()

    def resolve(self, name: str) -> Model | None:
        """The model of that name or alias."""
        return self.models.get(name) or self.models.get(self.aliases.get(name, ""))


_RECORDS: dict[str, Any] = {
    "nodes": dict[str, Node], "devices": dict[str, Device], "grants": dict[int, Grant],
    "configurations": dict[str, Configuration], "models": dict[str, Model], "aliases": dict[str, str],
    "weights": dict[str, WeightSet], "instances": dict[str, Instance], "images": dict[str, Image],
    "requests": dict[str, Request],
    "waiting": dict[str, tuple[str, ...]], "operations": dict[str, Operation], "gateways": dict[str, Gateway],
    "versions": dict[str, int],
}  # fmt: skip

K = TypeVar("K")
V = TypeVar("V")


def dump(fleet: Fleet) -> bytes:
    """Encode a fleet (JSON) for a snapshot or for the wire."""
    plain: dict[str, object] = {
        name: dict(value) if isinstance(value := getattr(fleet, name), Map) else value for name in Fleet.__struct_fields__
    }
    return msgspec.json.encode(plain)


def load(data: bytes) -> Fleet:
    """Decode what `dump` made. Raises msgspec.DecodeError or ValidationError on anything else."""
    raw: dict[str, msgspec.Raw] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        if name in _RECORDS:
            fields[name] = Map(msgspec.json.decode(value, type=_RECORDS[name]))
        else:
            fields[name] = msgspec.json.decode(value)
    return Fleet(**fields)
