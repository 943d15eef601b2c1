"""What is left of a plane: every process that belongs to a data directory, found by what it was started with."""

import os
import signal
from pathlib import Path
from typing import Final

from compose.embedded.cluster import Cluster
from compose.embedded.refusal import ServerRefusal
from compose.process import Identity, end

MARK: Final = "ENGINEHOUSE_PLANE"
"""Environment variable that `up` gives to all it starts; its descendants inherit it."""
SERVERS: Final = frozenset({"postgres", "nats-server"})
MODULES: Final = ("controlplane.", "web.", "worker.", "pool.")


def belonging(data: Path) -> list[Identity]:
    """Return the live processes of the plane in `data`, oldest first; this process is not among them."""
    roots = _roots(data)
    found: list[Identity] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        if _belongs(entry, roots) and (identity := Identity.of(int(entry.name))) is not None:
            found.append(identity)
    return sorted(found, key=lambda one: one.started)


async def clear(data: Path, *, deadline_s: float = 5.0) -> int:
    """End all that is left of the plane in `data`; return how many there were. Raises TimeoutError (see `end`)."""
    count = 0
    while left := belonging(data):  # once more, for what they started in the meantime
        count += len(left)
        servers = [one for one in left if _program(one.pid) in SERVERS]
        await end([one for one in left if one not in servers], deadline_s=deadline_s)
        await end(servers, deadline_s=deadline_s, number=signal.SIGINT)  # to Postgres: fast, without waiting for clients
    return count


def _program(pid: int) -> str:
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
    except OSError:
        return ""


def _roots(data: Path) -> tuple[str, ...]:
    """The data directory, and where its Postgres lives if that is elsewhere."""
    try:
        return str(data), str(Cluster.of(data).home)
    except ServerRefusal:  # then it was never started either
        return (str(data),)


def _belongs(entry: Path, roots: tuple[str, ...]) -> bool:
    try:
        argv = [os.fsdecode(part) for part in (entry / "cmdline").read_bytes().split(b"\0")]
        if _names(argv, roots):
            return True
        marks = (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is not ours to look at
        return False
    return os.fsencode(f"{MARK}={roots[0]}") in marks


def _names(argv: list[str], roots: tuple[str, ...]) -> bool:
    """Whether this is one of our programs with a path in one of the roots among its arguments."""
    server = Path(argv[0]).name.rstrip(":") in SERVERS
    module = len(argv) > 2 and "-m" in argv and argv[argv.index("-m") + 1].startswith(MODULES)
    return (server or module) and any(part == root or f"{root}/" in part for part in argv[1:] for root in roots)
