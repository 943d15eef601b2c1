"""Memory of devices that processes of others have. It comes and goes as they like, and nobody here can send it away.

Nothing is placed where it would not fit beside it (`needs.wanted`), nobody leaves for what would not fit then either, and
free cells that it leaves no bytes for are passed over while there are others (`crowded`). Whoever finds no place for that
reason waits, and is told both numbers and whose memory it is. What runs is left alone. Pure.
"""

from collections.abc import Iterable

from controlplane.decisions.needs import device_bytes, held_bytes, sure_bytes, wanted
from controlplane.fleet.members import Instance, Model
from controlplane.fleet.places import Device
from controlplane.fleet.state import Fleet
from controlplane.quantities import human_bytes, need_and_limit

NAMED = 4
"""Processes in a sentence; the largest ones."""


def crowded(fleet: Fleet, model: Model, device: str, staying: Iterable[Instance] | None = None) -> bool:
    """Whether the model does not fit there beside others' memory and those who hold cells, whatever cells are free.

    `staying`: of these, those that count; None: all.
    """
    known = fleet.devices[device]
    if not known.foreign:
        return False
    if staying is None:
        staying = [fleet.instances[grant.instance] for grant in fleet.grants.values() if grant.device == device]
    held = sum({i.instance: held_bytes(fleet, i, device) for i in staying}.values())
    return device_bytes(fleet, model, known) + held > known.usable_bytes


def hindrance(fleet: Fleet, model: Model) -> str | None:
    """Why the model has no place where it would have one without others' memory, with both numbers; None: that is not why."""
    if wanted(fleet, model):
        return None
    sure, others = sure_bytes(fleet, model), [fleet.devices[device] for device in wanted(fleet, model, beside=False)]
    spoilt = [device for device in others if device.usable_bytes < sure]
    if not spoilt:
        return None
    best = max(spoilt, key=lambda device: (device.usable_bytes, device.name))
    need, left = need_and_limit(sure, best.usable_bytes)
    return (
        f"{model.model} needs {need} of {best.name}, and {left} of its {human_bytes(best.size_bytes)} are left by processes "
        f"that are not this plane's: {users(best)}; it starts when they have gone"
    )


def users(device: Device) -> str:
    """Who has it, and how many bytes each."""
    named = [
        f"pid {one.pid}{f' ({one.name})' if one.name else ''} has {human_bytes(one.size_bytes)}"
        for one in device.foreign[:NAMED]
    ]
    more = len(device.foreign) - NAMED
    return ", ".join(named) + (f", and {more} more" if more > 0 else "")
