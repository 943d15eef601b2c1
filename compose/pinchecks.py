"""Whether the pins of a settings file pin anything: by the plane's word where it runs, else by the file's own models."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from compose.check import Check
from compose.client import Client, elsewhere
from compose.refusal import ApiRefused, EnvironmentRefusal
from controlplane.plane import Plane
from controlplane.settings import Settings, SettingsError, read

LOOK_S: Final = 3.0
_CURE: Final = "Write what `enginehouse models` or `enginehouse images` lists; a name that appears later counts from then on."


def pin_check(data: Path, *, running: bool) -> Iterator[Check]:
    """Nothing where nothing is pinned, or no plane has been started."""
    try:
        path = Plane.read(data).settings_path
        settings = read(Path(path)) if path else None
    except (FileNotFoundError, SettingsError, ValueError):  # other lines, and `up` itself, say so
        return
    if settings is None or not settings.node.image_pins:
        return
    idle = told(data, "notes") if running and elsewhere() is None else None
    if idle is None:
        idle = unnamed(settings)
    if idle:
        yield Check(name="pins", verdict="note", found="; ".join(idle), cure=_CURE)
    else:
        yield Check(name="pins", verdict="ok", found=f"[images] pin: {', '.join(settings.node.image_pins)}")


def unnamed(settings: Settings) -> tuple[str, ...]:
    """A sentence for each pin that names no model of the file; configurations are known to a plane that runs alone."""
    names = {model.name for model in settings.models}
    missing = [pin for pin in settings.node.image_pins if pin not in names and not pin.startswith("cfg_")]
    return tuple(
        f'[images] pin: no model in the file is called "{pin}"; one that was added otherwise may be' for pin in missing
    )


def told(data: Path, field: str) -> tuple[str, ...] | None:
    """The plane's own sentences about its nodes, each once; None: it does not answer."""
    with contextlib.suppress(EnvironmentRefusal, ApiRefused):
        client = Client.of(data, LOOK_S)
        try:
            return tuple(dict.fromkeys(note for node in client.get("api", "nodes") for note in node.get(field, ())))
        finally:
            client.close()
    return None
