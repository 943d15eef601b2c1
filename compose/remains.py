"""What is left of a plane: every process that belongs to a data directory, found by what it was started with."""

import os
import signal
from itertools import pairwise
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
    name, cluster = str(data), _cluster(data)
    found: list[Identity] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        if _belongs(entry, name, cluster) and (identity := Identity.of(int(entry.name))) is not None:
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


def _cluster(data: Path) -> str | None:
    """Where the plane's Postgres keeps its data; None: nowhere, it can't have been started."""
    try:
        return str(Cluster.of(data).data)
    except ServerRefusal:
        return None


def _belongs(entry: Path, data: str, cluster: str | None) -> bool:
    try:
        argv = [os.fsdecode(part) for part in (entry / "cmdline").read_bytes().split(b"\0")]
        if _names(argv, data, cluster):
            return True
        marks = (entry / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is not ours to look at
        return False
    return os.fsencode(f"{MARK}={data}") in marks


def _names(argv: list[str], data: str, cluster: str | None) -> bool:
    """Whether this is one of our programs, started for exactly this directory: what lies below it may be another plane's."""
    given = dict(pairwise(argv))
    match Path(argv[0]).name, given.get("-m", ""):
        case "postgres", _:
            return cluster is not None and given.get("-D") == cluster
        case "nats-server", _:
            return given.get("-c") == f"{data}/nats/nats.conf"
        case _, module if module.startswith(MODULES):
            instance = given.get("--instance-dir", "").startswith(f"{data}/run/inst/")
            return instance or given.get("--data") == data or given.get("--socket") == f"{data}/run/pool/pool.sock"
        case _:
            return False
