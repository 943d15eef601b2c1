"""The node worker: `python -m worker.agent --data DIR`.

On SIGTERM it leaves; holders, engines and frontends stay as they are, for the next one to take up.
"""

import argparse
import asyncio
import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from controlplane import lean, parties
from controlplane.bus import Bus
from controlplane.fleet import Model
from controlplane.logs import write_json_lines
from controlplane.plane import Plane
from worker import sources
from worker.caller import Caller
from worker.deadlines import Deadlines
from worker.failure import StepFailed
from worker.life import Life
from worker.shelf import Prepare, ProgressCall

LOCK_S: Final = 15.0
"""An earlier worker that was told to leave needs up to five seconds."""
LOCK_RETRY_S: Final = 0.2
WARM_AFTER_S: Final = 1.0
DEADLINES: Final = "ENGINEHOUSE_DEADLINES"
"""JSON with other deadlines than `deadlines.Deadlines` has, in seconds: `{"connect": 5}`. For tests, and for slow machines."""


async def work(data: Path) -> None:
    """Be the worker of `data` until SIGTERM or SIGINT. Raises SystemExit when another one is."""
    plane = Plane.read(data)
    deadlines = msgspec.json.decode(os.environ.get(DEADLINES, "{}"), type=Deadlines)
    lock = await exclusive(data)
    await asyncio.to_thread(sources.sweep, data)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    living = asyncio.create_task(_live(plane, data, deadlines), name="life")
    waiting = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait({living, waiting}, return_when=asyncio.FIRST_COMPLETED)
        for task in (living, waiting):
            task.cancel()
        results = await asyncio.gather(living, waiting, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
    finally:
        os.close(lock)


async def _live(plane: Plane, data: Path, deadlines: Deadlines) -> None:
    bus = await Bus.connect(plane, f"worker:{plane.node}", parties.node(plane.node))
    try:
        async with Caller() as caller:
            warming = asyncio.create_task(_warm(caller), name="warm")
            try:
                await Life(plane, bus, caller, preparing(data), deadlines).run()
            finally:
                warming.cancel()
    finally:
        await bus.close()


async def _warm(caller: Caller) -> None:
    """When others start no more: what the first climb would otherwise wait for."""
    await asyncio.sleep(WARM_AFTER_S)
    await asyncio.to_thread(caller.warm)


def preparing(data: Path) -> Prepare:
    """Sources of this node's data directory, opened by `worker.sources`."""

    async def prepare(model: Model, progress: ProgressCall) -> sources.Prepared:
        try:
            return await sources.prepare(model.spec, data, progress)
        except sources.SourceRefused as refused:
            raise StepFailed(refused.code, refused.message, final=refused.final) from refused

    return prepare


async def exclusive(data: Path) -> int:
    """Be the only worker of this data directory. Raises SystemExit, naming the other, when it stays."""
    path = data / "run" / "worker.lock"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ends = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > ends:
                other = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
                raise SystemExit(f"worker_running: pid {other} is the worker of {data}; end it first") from None
            await asyncio.sleep(LOCK_RETRY_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def main() -> int:
    lean.started()
    parser = argparse.ArgumentParser(prog="worker.agent")
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    os.umask(0o077)
    write_json_lines()
    asyncio.run(work(options.data.absolute()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
