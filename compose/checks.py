"""What a machine must have to run a plane, and what is good to have: one small check each, with its cure."""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
import psutil

from compose.check import Check
from compose.childstate import ChildState
from compose.directory import ROOM_BYTES
from compose.embedded import nats
from compose.embedded.cluster import ROOT_HOME, Cluster, orphans
from compose.embedded.programs import abandoned as wheels
from compose.embedded.refusal import ServerRefusal
from compose.gpus import look
from compose.imagechecks import image_checks
from compose.nodechecks import node_check
from compose.parts import pool_words
from compose.pinchecks import pin_check
from compose.remains import belonging
from compose.settingschecks import settings_check
from compose.supervisor import read_states
from compose.unsavedchecks import unsaved_check
from compose.vigil import GAVE_NO_ANSWER
from controlplane.plane import Plane
from controlplane.quantities import human_bytes
from pool.place import abandoned as pool_places
from worker.engines.vllm_faults import users
from worker.gpulocks import place as lock_place
from worker.gpus import processes
from worker.preparedcopies import GRACE_S
from worker.sources.leaving import prepared, unneeded_since

SHM: Final = Path("/dev/shm")  # noqa: S108 (looked at only)
PYTHONS: Final = ((3, 11), (3, 13))


def checks(data: Path, port: int, running: bool) -> Iterator[Check]:
    """Run every check for a plane in `data` on `port`. `running`: a plane runs there, so its port is taken rightly."""
    for check in (_python, _transformers, _memory):
        yield check()
    yield from _devices(data)
    yield _disk(data)
    yield from _servers(data)
    yield _shared_memory(data)
    yield node_check(data, running=running)
    yield from _pool(data)
    yield from image_checks(data)
    yield from settings_check(data, running=running)
    yield from pin_check(data, running=running)
    yield from unsaved_check(data, running=running)
    yield from _sources(data)
    yield _port(port, running)
    if running:
        yield from answering(read_states(data))
    yield from _left_over()


def _python() -> Check:
    found = f"Python {sys.version.split()[0]} at {sys.executable}"
    good = PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]
    return Check(
        name="python", verdict="ok" if good else "bad", found=found, cure="" if good else "Use Python 3.11, 3.12 or 3.13."
    )


def _transformers() -> Check:
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        return Check(
            name="engines", verdict="note", found=f"{' and '.join(missing)} not installed: no engine for real models",
            cure="pip install 'enginehouse[cpu]'",
        )  # fmt: skip
    return Check(name="engines", verdict="ok", found="torch and transformers are installed")


def _memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{human_bytes(memory.available)} of {human_bytes(memory.total)} available"
    good = memory.available > 1 << 30
    return Check(name="memory", verdict="ok" if good else "bad", found=found, cure="" if good else "Free at least 1 GiB.")


def _disk(data: Path) -> Check:
    place = next(path for path in (data, *data.parents) if path.exists())
    free = shutil.disk_usage(place).free
    good = free >= ROOM_BYTES
    cure = "" if good else f"Make {human_bytes(ROOM_BYTES)} of room, or choose another directory with --data."
    return Check(name="disk", verdict="ok" if good else "bad", found=f"{human_bytes(free)} free for {data}", cure=cure)


def _servers(data: Path) -> Iterator[Check]:
    probes: tuple[tuple[str, Callable[[], object]], ...] = (
        ("postgres", lambda: _version([str(Cluster.of(data).programs / "postgres"), "-V"])),
        ("nats", lambda: _version([str(nats.binary()), "--version"])),
    )
    for name, probe in probes:
        try:
            yield Check(name=name, verdict="ok", found=str(probe()))
        except ServerRefusal as refusal:
            yield Check(name=name, verdict="bad", found=refusal.message, cure=refusal.cure)
        except (OSError, subprocess.SubprocessError) as error:
            cure = f"Install it again (pip install --force-reinstall), or give a server with --{name}."
            yield Check(name=name, verdict="bad", found=f"does not run: {error}", cure=cure)


def _version(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _shared_memory(data: Path) -> Check:
    if not SHM.is_dir():
        return Check(name="shared memory", verdict="note", found=f"no {SHM}", cure="Weights go to the data directory: slower.")
    disk = shutil.disk_usage(SHM)
    found = f"{human_bytes(disk.free)} of {human_bytes(disk.total)} free in {SHM}"
    try:
        pool = Plane.read(data).pool_bytes
    except (FileNotFoundError, msgspec.DecodeError):
        return Check(name="shared memory", verdict="ok", found=found)
    if disk.total < pool:
        cure = f"The pool's budget is {human_bytes(pool)}: give more (docker: --shm-size), or lower pool_bytes."
        return Check(name="shared memory", verdict="note", found=found, cure=cure)
    return Check(name="shared memory", verdict="ok", found=found)


def _pool(data: Path) -> Iterator[Check]:
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # nothing has been started there yet
        yield Check(name="pool", verdict="ok", found=pool_words(Plane.read(data)))


def _devices(data: Path) -> Iterator[Check]:
    """GPUs, as NVML sees them, what is missing to use them, and who else has their memory."""
    found = look(None)
    if not found.gpus:
        yield Check(name="devices", verdict="ok", found="no GPU: devices are declared shares of host memory")
        return
    names = ", ".join(f"{gpu.name}, {human_bytes(gpu.size_bytes)}" for gpu in found.gpus)
    if found.missing:
        yield Check(
            name="devices", verdict="note", found=f"{len(found.gpus)} GPUs ({names}) are not used: {found.missing} is missing",
            cure="pip install 'enginehouse[gpu]'",
        )  # fmt: skip
    else:
        yield Check(name="devices", verdict="ok", found=f"{len(found.gpus)} GPUs: {names}")
    place, word = lock_place(Path("/run/lock"))
    yield Check(
        name="gpu locks",
        verdict="note" if word else "ok",
        found=word or f"in {place}, for all planes of this machine",
        cure="Make /run/lock/enginehouse writable for those who run planes here." if word else "",
    )
    ours = {one.pid for one in belonging(data)} if data.exists() else set()
    for gpu in found.gpus:
        if others := {pid: size for pid, size in processes(gpu.uuid).items() if pid not in ours}:
            yield Check(
                name="gpu memory", verdict="note", found=f"gpu{gpu.index} is {users(others)}, which no plane here started",
                cure="End them, or leave this GPU out of gpus in the settings' [node] table.",
            )  # fmt: skip


def _left_over() -> Iterator[Check]:
    """What planes have left whose data directories are gone, and installations that are."""
    if segments := pool_places():
        found = f"the weights of {len(segments)} planes ({_size(segments)} of memory) whose data directories are gone"
        cure = f"The next `up` removes them; until then:{_removal(segments)}"
        yield Check(name="left over", verdict="note", found=found, cure=cure)
    if os.geteuid() != 0:
        return
    if clusters := orphans():
        found = f"{len(clusters)} Postgres clusters ({_size(clusters)}) whose data directories are gone"
        cure = f"If none of them comes back:{_removal(clusters)}"
        yield Check(name="left over", verdict="note", found=found, cure=cure)
    if copies := wheels(ROOT_HOME):
        found = f"{len(copies)} copies of Postgres' programs ({_size(copies)}) whose installations are gone"
        cure = f"Once nothing runs from them:{_removal(copies)}"
        yield Check(name="left over", verdict="note", found=found, cure=cure)


def _size(places: list[Path]) -> str:
    size = 0
    for folder, _, names in (found for place in places for found in os.walk(place)):  # a folder that is gone is passed over
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # somebody removes it
                size += os.lstat(os.path.join(folder, name)).st_size
    return human_bytes(size)


def _removal(places: list[Path]) -> str:
    """A command for a shell, on lines of its own, one place on each: dozens of them on one line nobody can read or check."""
    return " \\\n    ".join(["\nrm -r", *(shlex.quote(str(place)) for place in places)])


def answering(states: Sequence[ChildState]) -> Iterator[Check]:
    """Of a plane that runs: who is there and does not answer, and who was started again for that."""
    fine = True
    for one in states:
        if one.state == "silent":
            silent_s = max(0, time.time_ns() // 1_000_000 - one.since_ms) // 1000
            found = f"{one.name} (pid {one.pid}) has not answered for {silent_s} s"
            cure = f"`up` starts it again when that lasts. A debugger keeps it from doing so; logs/{one.name}.log may say more."
            yield Check(name="answers", verdict="bad", found=found, cure=cure)
        elif one.state == "unwatched":
            found = f"{one.name} (pid {one.pid}) runs; `up` can't see whether it answers, and tries again and again"
            yield Check(name="answers", verdict="bad", found=found, cure="See logs/up.log. If it lasts, start `up` anew.")
        elif one.state == "waiting":
            found = f"{one.name} has ended: {one.last_exit}"
            yield Check(name="answers", verdict="bad", found=found, cure=f"`up` starts it again. See logs/{one.name}.log.")
        elif one.state == "ready" and GAVE_NO_ANSWER in one.last_exit:
            found = f"{one.name} was {one.last_exit}; it has been started again and answers"
            yield Check(
                name="answers", verdict="note", found=found, cure=f"See logs/up.log, and logs/{one.name}.log before it."
            )
        else:
            continue
        fine = False
    if fine and (names := [one.name for one in states if one.state == "ready"]):
        yield Check(name="answers", verdict="ok", found=", ".join(names))


def _sources(data: Path) -> Iterator[Check]:
    """Prepared copies of models' sources, and what of them waits to be removed."""
    models = data / "models"
    if not (names := prepared(models)):
        return
    found = f"{len(names)} prepared copies of models' sources ({_size([models / name for name in names])}) in {models}"
    if leaving := sorted(names & unneeded_since(models).keys()):
        found += f", of which nothing needs {len(leaving)} ({_size([models / name for name in leaving])})"
        cure = f"A plane removes them once nothing has needed them for {GRACE_S / 60:g} minutes."
        yield Check(name="sources", verdict="note", found=found, cure=cure)
    else:
        yield Check(name="sources", verdict="ok", found=found)


def _port(port: int, running: bool) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if running:
                return Check(name="port", verdict="ok", found=f"{port} is held by the plane that runs here")
            return Check(name="port", verdict="bad", found=f"{port}: {error.strerror}", cure="Free it, or use `up --port`.")
    return Check(name="port", verdict="ok", found=f"{port} is free")
