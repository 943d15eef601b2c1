"""The parts of a plane that `up` keeps running, and how each is started."""

import contextlib
import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import Final

import msgspec

from compose.child import ChildSpec
from compose.process import Identity
from compose.readiness import answers
from controlplane.plane import Plane
from controlplane.quantities import human_bytes
from pool.client import PoolClient, PoolRefused
from pool.pace import BESIDE_DECODING
from pool.place import LOCK

READY_PART: Final = 4
"""Of the pool's budget so much may lie ready, unless the settings say otherwise."""
WEB_STOP_S: Final = 8.0
"""Its streams are told first."""
SURVIVORS: Final = frozenset({"pool"})
"""Children that a killed `up` leaves running for the next one: what is in the pool took long to read."""
SHM: Final = Path("/dev/shm")  # noqa: S108 (looked at only)


PYTHON: Final = (sys.executable, "-P", "-m")


def faces(plane: Plane) -> list[ChildSpec]:
    """What may start before the servers answer: it waits for them, and what it imports takes longer than their start."""

    async def web_ready() -> bool:
        return await answers(plane.web_host, plane.web_port, "/readyz?after=0")  # settings or not: they come next

    return [
        ChildSpec(name="decider", argv=(*PYTHON, "controlplane.decider", "--data", plane.data)),
        ChildSpec(name="web", argv=(*PYTHON, "web.server", "--data", plane.data), ready=web_ready, stop_s=WEB_STOP_S),
    ]


def hands(plane: Plane) -> list[ChildSpec]:
    """What starts once the servers answer and the log has this release's schema."""
    worker = (*PYTHON, "worker.agent", "--data", plane.data)
    return [_pool(plane), ChildSpec(name="worker", argv=worker, environment=_deadlines(plane))]


def _deadlines(plane: Plane) -> dict[str, str]:
    return {"ENGINEHOUSE_DEADLINES": msgspec.json.encode(plane.deadlines).decode()} if plane.deadlines else {}


def _pool(plane: Plane) -> ChildSpec:
    socket = Path(plane.pool_socket)
    gpus = {known.device for known in plane.devices if known.kind == "gpu"}

    def prepare() -> None:
        socket.parent.mkdir(mode=0o700, exist_ok=True)

    async def ready() -> bool:
        try:
            client = await PoolClient.connect(socket, deadline_s=1)
        except (OSError, TimeoutError):
            return False
        try:
            said = await client.describe()
            seen = {one.device for one in said.devices}
            told = (said.budget_bytes, said.ready_limit_bytes, said.helpers, said.beside_decoding)
            wanted = (plane.pool_bytes, ready_bytes(plane), plane.pool_helpers, beside_decoding(plane))
            return seen == gpus and told == wanted  # else it must start anew
        except (OSError, TimeoutError, PoolRefused):
            return False
        finally:
            await client.close()

    def already() -> Identity | None:
        return holder_of(socket.parent / LOCK)

    # It is asked to end only when the plane ends in order, and then nothing is to stay in memory.
    options = ("--socket", str(socket), "--directory", str(socket.parent), "--budget", str(plane.pool_bytes), "--forget")
    ways = [*(["--gpus"] if gpus else []), *([] if plane.pool_helpers else ["--no-helpers"])]
    limits = ("--ready", str(ready_bytes(plane)), "--beside-decoding", str(beside_decoding(plane)))
    argv = (*PYTHON, "pool.daemon", *options, *limits, *ways)
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(sorted(gpus))} if gpus else {}
    return ChildSpec(
        name="pool", argv=argv, environment=environment, prepare=prepare, ready=ready, survives=True, already=already
    )


def holder_of(lock: Path) -> Identity | None:
    """The process that holds this lock: by the pid that it has written there, and that process has the file open. None: nobody
    does, or it has yet to write, and the pid is that of an earlier one, which may be anybody's by now."""
    with contextlib.suppress(OSError, ValueError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = Identity.of(int(file.read(32)))
            return holder if holder is not None and _has_open(holder.pid, file.fileno()) else None
    return None


def _has_open(pid: int, descriptor: int) -> bool:
    """Whether a process has the file open that this descriptor of ours is of. Raises OSError."""
    wanted = os.fstat(descriptor)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by now
            if os.path.samestat(entry.stat(), wanted):
                return True
    return False


def ready_bytes(plane: Plane) -> int:
    """What may lie ready in its pool."""
    return plane.pool_bytes // READY_PART if plane.pool_ready_bytes is None else plane.pool_ready_bytes


def beside_decoding(plane: Plane) -> float:
    """Of a link's rate, for a copy beside an engine that decodes."""
    return BESIDE_DECODING if plane.pool_beside_decoding is None else plane.pool_beside_decoding


def pool_words(plane: Plane) -> str:
    """How the pool is set up."""
    helped = "GPUs help one another" if plane.pool_helpers else "each GPU is filled over its own link alone"
    share = beside_decoding(plane)
    beside = f"keep to {share * 100:g} % of their link" if share < 1 else "are not slowed"
    gpus = ""
    if any(device.kind == "gpu" for device in plane.devices):
        gpus = f"; {helped}; copies beside an engine that decodes {beside}"
    return f"{human_bytes(plane.pool_bytes)} for weights, {human_bytes(ready_bytes(plane))} of it may lie ready{gpus}"


def pool_note(plane: Plane) -> str | None:
    """What a person should know about where the pool is; None: it is where it should be."""
    free = shutil.disk_usage(SHM).free if SHM.is_dir() else 0
    if free >= plane.pool_bytes:
        return None
    return (
        f"{SHM} has {human_bytes(free)} free and the pool's budget is {human_bytes(plane.pool_bytes)}: weights may go to "
        f"{plane.data} instead, which may be slower; give the machine more shared memory or declare a smaller pool_bytes"
    )
