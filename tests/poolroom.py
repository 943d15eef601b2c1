"""For tests: a real pool daemon in a process of its own, sources for it, and waiting on conditions."""

import asyncio
import contextlib
import gc
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from pool.arena import READY
from pool.client import PoolClient
from pool.place import OWNER, SHARED_MEMORY, digest, place

MIB = 1 << 20
DEADLINE_S = 60.0
"""Of what is there in a moment, where nothing else runs."""


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, at = {}, 0
    kinds = {"float32": "F32", "uint8": "U8", "uint16": "BF16", "int64": "I64"}
    for name, array in tensors.items():
        header[name] = {"dtype": kinds[str(array.dtype)], "shape": array.shape, "data_offsets": (at, at + array.nbytes)}
        at += array.nbytes
    encoded = msgspec.json.encode(header)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for array in tensors.values():
            file.write(array.tobytes())


def forget(directory: Path) -> None:
    """Remove the segments of this directory's daemon, which has ended, whoever's it was: they outlive it, in shared memory."""
    for root in SHARED_MEMORY.glob(f"enginehouse-*-{digest(directory)}"):
        shutil.rmtree(root, ignore_errors=True)


def remove(directory: Path) -> None:
    """As `rm -r` does, and again as long as it must: who has the directory may still be making files there."""

    def gone() -> bool:
        with contextlib.suppress(OSError):
            shutil.rmtree(directory)
        return not directory.exists()

    wait_for(gone)


SLOW = """
import os, sys, time
from pool import daemon, stage

def read_into(fd, chunk, offset, quick=stage.read_into):
    quick(fd, chunk, offset)
    ends = time.monotonic() + 0.5
    while os.path.exists(sys.argv[1]) and time.monotonic() < ends:
        time.sleep(0.01)

stage.read_into = read_into
sys.exit(daemon.main(sys.argv[2:]))
"""
"""A daemon whose readers take half a second a chunk while a file is there: what a test does meanwhile finds them at it."""


@dataclass
class Daemon:
    """`slow`: the file for which readers take their time, see `SLOW`."""

    directory: Path
    budget: int = 512 * MIB
    extra: tuple[str, ...] = ()
    slow: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    socket: Path = field(init=False)
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.socket = self.directory / "pool.sock"
        self.log = self.directory / "log"

    @property
    def root(self) -> Path:
        return place(self.directory, self.budget)

    def kept(self) -> list[str]:
        """What lies in the place, sets and drafts."""
        return sorted({path.name for path in self.root.iterdir()} - {OWNER, READY})

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> "Daemon":
        arguments = [
            "--socket",
            str(self.socket),
            "--directory",
            str(self.directory),
            "--budget",
            str(self.budget),
            *self.extra,
        ]
        before = self.events("ready")
        with self.log.open("ab") as log:
            program = ["-m", "pool.daemon"] if self.slow is None else ["-c", SLOW, str(self.slow)]
            self.process = subprocess.Popen([sys.executable, *program, *arguments], stderr=log)
        wait_for(lambda: len(self.events("ready")) > len(before) or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def events(self, name: str) -> list[dict[str, object]]:
        text = self.log.read_text() if self.log.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may still be on its way
        return [line for line in map(json.loads, lines) if line["event"] == name]

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[PoolClient]:
        async with await PoolClient.connect(self.socket) as client:
            yield client


def wait_for(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.005)


def descriptors(pid: int | str = "self") -> int:
    """Open ones of a process; of this one without those that only garbage has, of tests before this one, too."""
    if pid == "self":
        gc.collect()
    return len(os.listdir(f"/proc/{pid}/fd"))
