"""Where a bench puts what it makes."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from compose.directory import LONGEST_SOCKET, SOCKET_LIMIT
from compose.refusal import EnvironmentRefusal

ENGINE_SOCKET: Final = "/01234567890123456789/control.sock"
"""Below the directory of a bench that runs engines itself, the longest path that becomes a socket."""


@contextmanager
def workplace(work: Path | None, longest: str | None = ENGINE_SOCKET) -> Iterator[Path]:
    """`work`, which stays; None: a new directory, removed afterwards. `longest`: below it, of the paths of sockets, if any.

    Raises EnvironmentRefusal (`path_too_long`).
    """
    path = (work or Path(tempfile.mkdtemp(prefix="enginehouse-bench-"))).resolve()
    try:
        if longest is not None:
            _fits(path, longest, "Choose a shorter one with --work.")
        yield path
    finally:
        if work is None:
            shutil.rmtree(path, ignore_errors=True)


def plane_place() -> Path:
    """A new data directory for a plane of a bench's own. Raises EnvironmentRefusal (`path_too_long`)."""
    _fits(
        Path(tempfile.gettempdir(), "ehb-12345678"), LONGEST_SOCKET, "Name a shorter directory for temporary files in TMPDIR."
    )
    return Path(tempfile.mkdtemp(prefix="ehb-"))


def _fits(path: Path, longest: str, cure: str) -> None:
    room, size = SOCKET_LIMIT - len(longest), len(os.fsencode(path))
    if size > room:
        raise EnvironmentRefusal("path_too_long", f"{path} has {size} bytes; sockets below it leave room for {room}.", cure)
