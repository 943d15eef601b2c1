"""Which processes really map a set, whatever connections say: a restarted daemon may not yet have heard from its engines."""

import os
from pathlib import Path


def mapping_processes(directory: Path) -> tuple[int, ...]:
    """Process ids, ascending, that map files of this directory: of our own user, or of all as root.

    By path, since over some file systems (overlayfs, btrfs) the device in `maps` is not the one that `stat` tells.
    """
    wanted = b" " + os.fsencode(directory.resolve()) + b"/"
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            with (entry / "maps").open("rb") as maps:
                if wanted in maps.read():  # in one go: line by line this keeps the interpreter from those who copy
                    found.append(int(entry.name))
        except (PermissionError, FileNotFoundError, ProcessLookupError):  # another user's, or it has just ended
            continue
    return tuple(sorted(found))
