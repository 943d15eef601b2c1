"""Which settings file a plane has, and what it says at the start."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from compose.refusal import EnvironmentRefusal
from controlplane.settings import Settings, read

NAME: Final = "enginehouse.toml"

Stamp = tuple[int, int, int, int] | None
SIZE = 3
"""Where a stamp has the file's size."""


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """None: no file; the plane has the models that it knows already."""

    path: Path | None = None
    settings: Settings = Settings()
    seen: Stamp = None
    """The file's stamp before it was read."""


async def choose(given: Path | None, data: Path, say: Callable[[str], None], *, demo: bool) -> Chosen:
    """Return the demonstration's settings, those of the given file, or those of the one in `data`. Raises
    SettingsError or EnvironmentRefusal."""
    if demo:
        from compose.demo import DemoFailed, prepare  # noqa: PLC0415 (nobody else needs what it imports)

        try:
            path: Path | None = await prepare(data, say)
        except DemoFailed as error:
            raise EnvironmentRefusal("demo", str(error), "The models that are made already are kept.") from error
    else:
        path = given or (data / NAME if (data / NAME).exists() else None)
    if path is None:
        return Chosen()
    path = path.absolute()  # not resolved: a link may point elsewhere tomorrow
    seen = stamp(path)
    return Chosen(path=path, settings=read(path), seen=seen)


def stamp(path: Path) -> Stamp:
    """What changes when the file is written, replaced, or when a link on the way to it is swapped. None: it isn't there."""
    try:
        status = path.stat()  # of the target: an atomic swap of a link in between shows as another inode
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
