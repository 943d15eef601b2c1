"""The parts of a plane that `up` keeps running, and how each is started."""

import hashlib
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Final

from compose.child import ChildSpec
from compose.readiness import answers
from controlplane.plane import Plane
from controlplane.quantities import human_bytes
from pool.client import PoolClient

WEB_STOP_S: Final = 8.0
"""Its streams are told first."""
SURVIVORS: Final = frozenset({"pool"})
"""Children that a killed `up` leaves running for the next one: what is in the pool took long to read."""
SHM: Final = Path("/dev/shm")  # noqa: S108 (a directory of our own in it, 0700)


def specs(plane: Plane) -> list[ChildSpec]:
    """In the order in which they start; they end in the opposite one."""
    python = (sys.executable, "-P", "-m")

    async def web_ready() -> bool:
        return await answers(plane.web_host, plane.web_port)

    return [
        _pool(plane, python),
        ChildSpec(name="decider", argv=(*python, "controlplane.decider", "--data", plane.data)),
        ChildSpec(name="worker", argv=(*python, "worker.agent", "--data", plane.data)),
        ChildSpec(name="web", argv=(*python, "web.server", "--data", plane.data), ready=web_ready, stop_s=WEB_STOP_S),
    ]


def _pool(plane: Plane, python: tuple[str, ...]) -> ChildSpec:
    socket = Path(plane.pool_socket)
    segments = pool_directory(plane)

    def prepare() -> None:
        for folder in (socket.parent, segments):
            folder.mkdir(mode=0o700, exist_ok=True)

    async def ready() -> bool:
        try:
            client = await PoolClient.connect(socket, deadline_s=1)
        except (OSError, TimeoutError):
            return False
        try:
            return (await client.describe()).budget_bytes == plane.pool_bytes  # another budget: it must start anew
        except (OSError, TimeoutError):
            return False
        finally:
            await client.close()

    argv = (
        *python, "pool.daemon", "--socket", str(socket), "--directory", str(segments), "--budget", str(plane.pool_bytes),
    )  # fmt: skip
    return ChildSpec(name="pool", argv=argv, prepare=prepare, ready=ready, survives=True)


def pool_directory(plane: Plane) -> Path:
    """Where the pool's segments are: shared memory when it has room for the budget, else a file system.

    What a daemon has put in one place is looked for there again, so a directory that exists stays in use.
    """
    digest = hashlib.sha256(os.fsencode(plane.data)).hexdigest()[:12]
    shared, own = SHM / f"enginehouse-{os.geteuid()}-{digest}", Path(plane.pool_socket).parent / "segments"
    if os.path.lexists(shared):
        return shared if _ours(shared) else own
    if own.exists() or not SHM.is_dir() or shutil.disk_usage(SHM).free < plane.pool_bytes:
        return own
    return shared


def _ours(path: Path) -> bool:
    """Whether it is a directory of this account, not a link or a trap that another one has put there."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700


def pool_note(plane: Plane) -> str | None:
    """What a person should know about where the pool is; None: it is where it should be."""
    where = pool_directory(plane)
    if where.is_relative_to(SHM):
        return None
    free = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    return (
        f"{SHM} has {human_bytes(free)} free and the pool's budget is {human_bytes(plane.pool_bytes)}: weights go to {where} "
        "instead, which may be slower; give the machine more shared memory or declare a smaller pool_bytes"
    )
