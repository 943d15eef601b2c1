"""Devices by the names that people gave or know, `cpu0`, `gpu1`: their ids, UUIDs, are for programs."""

from collections.abc import Iterable, Mapping
from typing import Final

from controlplane.events import AnyEvent, DeviceDeclared
from controlplane.fleet import Fleet
from web.views.sentences import sentence

_STREAM: Final = "device:"

Names = Mapping[str, str]
"""Id of a device -> its name; with its node's before it where nodes have devices of one name."""


def names(devices: Iterable[tuple[str, str, str]]) -> Names:
    """devices: (id, node, name) of each."""
    found = tuple(devices)
    known = [name for _, _, name in found]
    return {device: name if known.count(name) == 1 else f"{node}/{name}" for device, node, name in found}


def names_of(fleet: Fleet) -> Names:
    return names((one.device, one.node, one.name) for one in fleet.devices.values())


def stream_words(stream: str, known: Names) -> str:
    """A stream as people read it: `device:cpu0`. That of a device which is gone keeps its id."""
    device = stream.removeprefix(_STREAM)
    return _STREAM + known.get(device, device) if stream.startswith(_STREAM) else stream


def stream_meant(words: str, known: Names) -> str:
    """The stream that somebody means who wrote it with a device's name, or with its id."""
    name = words.removeprefix(_STREAM)
    if not words.startswith(_STREAM) or name in known:
        return words
    return next((_STREAM + device for device, called in known.items() if called == name), words)


def told(event: AnyEvent, known: Names) -> str:
    """Say what happened; of a device's event with its name."""
    name = known.get(getattr(event, event.KEY), "") if event.AGGREGATE == "device" else ""
    text = sentence(event)
    return f"{name}: {text}" if name and not isinstance(event, DeviceDeclared) else text
