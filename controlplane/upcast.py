"""Upcasters: how an event stored by an older release reads today. One small function per (type, old version), kept for ever."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from controlplane.events import BY_NAME

Data = dict[str, Any]

UPCASTERS: Final[dict[tuple[str, int], Callable[[Data], tuple[str, Data]]]] = {}
"""(type, v) -> the function that gives (type, data) of version v + 1."""


class UnknownEvent(Exception):
    """The log holds an event that this release can't read: it was written by a newer one. Upgrade before you start."""


def upcast(name: str, v: int, data: bytes) -> tuple[str, bytes]:
    """Return the current type name and data of a stored event."""
    kind = BY_NAME.get(name)
    if kind is not None and v == kind.V:
        return name, data
    fields: Data = msgspec.json.decode(data)
    while (step := UPCASTERS.get((name, v))) is not None:
        name, fields = step(fields)
        v += 1
    kind = BY_NAME.get(name)
    if kind is None or v != kind.V:
        raise UnknownEvent(f"event {name} v{v} is unknown to this release; it was written by a newer one")
    return name, msgspec.json.encode(fields)
