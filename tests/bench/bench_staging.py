"""How fast a set comes into memory that lies ready: `python -m tests.bench.bench_staging [--gib 1] [--cycles 5] [--gpus]`.

Two ways in: files that are staged (read from the page cache, hashed, laid out), and a deposit (eight threads of another process
write, the daemon hashes behind them). Beside each, turn by turn in the same run, the yardstick: a bare parallel memcpy of as
many bytes by `YARDSTICK` threads, from touched memory into segments of the same kind, mapped and touched. Medians of pairs.

Wall time is what counts; on a machine that others use the processors' time of both tells more, and is printed beside it.
"""

import argparse
import asyncio
import ctypes
import mmap
import os
import platform
import shutil
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pool.client import PoolRefused
from pool.huge import allocate, in_huge_pages
from pool.mapping import map_shared, unmap
from pool.place import SHARED_MEMORY
from pool.stage import READERS
from tests.bench.bench_pool import drop
from tests.bench.wakeloads import WRITERS, bring, request
from tests.poolroom import MIB, Daemon

LAYER = (34, 8, 8, 34, 100, 100, 100)
"""MiB of a layer's large tensors, as in a model of 8B; small ones beside them."""
YARDSTICK = max(2, min(8, (os.cpu_count() or 2) // 2))
"""Threads of the plain copy: half of the processors, eight at most. What comes in may use more of them."""
CHUNK_BYTES = 1 << 20
FILES = 8
PROBE_BYTES = 256 << 20
SLOW_BYTES_PER_S = 400e6
READY_S = 12.0
"""A wait for memory that lies ready: it begins after a second and a half, and 4 GiB take one or two."""
MOST = 0.95
"""Of the bytes that are waited for: tensors of less than a MiB share memory, and a deposit here leaves them out."""


def shape(total: int) -> list[int]:
    """Bytes of each tensor: an embedding of a fifteenth, layers, as many norms of 8 KiB."""
    found, number = [total // 15], 0
    while sum(found) < total:
        found.append(min(LAYER[number % len(LAYER)] * MIB, max(total - sum(found), 4096)))
        found.append(8192)
        number += 1
    return found


class Yardstick:
    """Memory to copy from and segments to copy into, all touched."""

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        self._from = mmap.mmap(-1, size)
        self._from.madvise(mmap.MADV_HUGEPAGE)
        path = directory / "yardstick"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        allocate(fd, 0, size)
        self.huge = in_huge_pages(fd, size)
        path.unlink()
        self._to = map_shared(fd, size)
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(self._from)), 1, size)
        self.copy(YARDSTICK)

    def copy(self, threads: int) -> tuple[float, float]:
        """Seconds, and seconds of processors."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._from))
        share = -(-self.size // threads // CHUNK_BYTES) * CHUNK_BYTES

        def part(number: int) -> None:
            for at in range(number * share, min((number + 1) * share, self.size), CHUNK_BYTES):
                ctypes.memmove(self._to + at, start + at, min(CHUNK_BYTES, self.size - at))

        with ThreadPoolExecutor(threads) as pool:
            begun, spent = time.perf_counter(), time.process_time()
            list(pool.map(part, range(threads)))
            return time.perf_counter() - begun, time.process_time() - spent

    def close(self) -> None:
        unmap(self._to, self.size)


def spent(pid: int) -> float:
    """Seconds of processors that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_source(directory: Path, sizes: list[int]) -> None:
    """A checkpoint, quickly: a random block again and again, but each tensor begins with its number; a file a thread."""
    block = np.random.default_rng(0).integers(0, 255, 64 * MIB, dtype=np.uint8)

    def write(which: int) -> None:
        entries, at = {}, 0
        own = range(which, len(sizes), FILES)
        for number in own:
            entries[f"t{number:04d}"] = {"dtype": "U8", "shape": (sizes[number],), "data_offsets": (at, at + sizes[number])}
            at += sizes[number]
        header = msgspec.json.encode(entries)
        with (directory / f"model-{which}.safetensors").open("wb", buffering=0) as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for number in own:
                file.write(number.to_bytes(8, "little"))
                for begun in range(8, sizes[number], len(block)):
                    file.write(block[: min(len(block), sizes[number] - begun)].data)

    with ThreadPoolExecutor(FILES) as threads:
        list(threads.map(write, range(FILES)))


def quick(directory: Path) -> bool:
    """Whether files are written there at some speed. If not they lie in shared memory, whose small pages are slower to read."""
    begun, path = time.monotonic(), directory / "probe"
    path.write_bytes(bytes(PROBE_BYTES))
    path.unlink()
    return time.monotonic() - begun < PROBE_BYTES / SLOW_BYTES_PER_S


async def ready(daemon: Daemon, size: int, *, pinned: bool) -> None:
    """Until as much memory lies ready, pinned where there are devices. Raises AssertionError with what there is by then."""
    end, have, ahead = time.monotonic() + READY_S, 0, list[dict[str, object]]()
    async with daemon.client() as client:
        while time.monotonic() < end:
            have = (await client.describe()).ready_bytes
            ahead = daemon.events("ready_ahead")
            if have >= size * MOST and (not pinned or (ahead and int(str(ahead[-1]["pinned"])) >= size * MOST)):
                return
            await asyncio.sleep(0.02)
    raise AssertionError(f"waited {READY_S:g} s for {size} bytes that lie ready: {have} do; last words: {ahead[-1:]}")


async def stage(daemon: Daemon, source: Path) -> str:
    async with daemon.client() as client:
        return (await client.stage(source)).weight_set


Work = Callable[[Daemon], tuple[str, int, dict[str, float]]]
"""Brings a set; its name, bytes, and seconds of each part."""


class Bench:
    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.begun = options, time.monotonic()
        self.source = Path(tempfile.mkdtemp(prefix="ehstaging-", dir=None if quick(directory) else SHARED_MEMORY))
        sizes = shape(int(options.gib * (1 << 30)))
        self.total = sum(sizes)
        write_source(self.source, sizes)
        self.say(f"the source is written, in {self.source}")
        self.directory = directory
        self.order = request(directory, "deposit", [-(-size // (2 * MIB)) * 2 * MIB for size in sizes if size >= MIB])
        self.found: dict[str, Any] = {
            "at": datetime.now(UTC).isoformat(), "machine": platform.platform(), "cores": os.cpu_count(), "bytes": self.total,
            "source": "shared memory" if self.source.is_relative_to(SHARED_MEMORY) else "page cache",
            "threads": {"staged": READERS, "deposited": WRITERS, "yardstick": YARDSTICK},
        }  # fmt: skip

    def say(self, what: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.1f} s] {what}", flush=True)

    def staged(self, daemon: Daemon) -> tuple[str, int, dict[str, float]]:
        begun = time.perf_counter()
        weight_set = asyncio.run(stage(daemon, self.source))
        return weight_set, self.total, {"stage_s": time.perf_counter() - begun}

    def deposited(self, daemon: Daemon) -> tuple[str, int, dict[str, float]]:
        weight_set, seconds = bring(daemon.socket, self.order, time.monotonic_ns() % (1 << 32))
        return weight_set, sum(self.order.segments), seconds

    def pair(self, daemon: Daemon, yardstick: Yardstick, work: Work) -> dict[str, float]:
        """The yardstick and one set that comes and goes; seconds of processors beside each."""
        yard, yard_spent = yardstick.copy(YARDSTICK)
        before, own = spent(daemon.pid), time.process_time()
        weight_set, size, seconds = work(daemon)
        used = spent(daemon.pid) - before + time.process_time() - own
        asyncio.run(drop(daemon, weight_set))
        took, yard, yard_spent = sum(seconds.values()), yard * size / self.total, yard_spent * size / self.total
        return {
            "gb_per_s": size / took / 1e9, "yardstick_gb_per_s": size / yard / 1e9, "ratio": yard / took,
            "cpu_s_per_gb": used / size * 1e9, "yardstick_cpu_s_per_gb": yard_spent / size * 1e9, **seconds,
        }  # fmt: skip

    def phase(self, name: str, work: Work) -> None:
        """With a daemon of its own: a first pair leaves memory of the sizes that the next ones find ready, and no other. One
        failing costs the rest of this phase."""
        rows: list[dict[str, float]] = []
        place = self.directory / name
        place.mkdir(mode=0o700)
        extra = ("--forget", "--ready", str(2 * self.total), *(("--gpus",) if self.options.gpus else ()))
        daemon = Daemon(place, budget=4 * self.total, extra=extra).start()
        yardstick = Yardstick(daemon.root, self.total)
        self.found["huge"] = yardstick.huge
        self.say("a daemon is up, and memory for the yardstick touched")
        try:
            for number in range(self.options.cycles + 1):
                if number:
                    asyncio.run(ready(daemon, self.total, pinned=self.options.gpus))
                row = {key: round(value, 4) for key, value in self.pair(daemon, yardstick, work).items()}
                self.say(f"{name}{'' if number else ', memory not ready'}: {row}")
                rows += [row] if number else []
                self.tell(name, rows)
        except (AssertionError, OSError, PoolRefused) as error:
            self.found[f"{name} failed"] = str(error)
            self.say(f"{name} failed: {error}")
            self.tell(name, rows)
        finally:
            yardstick.close()
            daemon.stop()

    def tell(self, name: str, rows: list[dict[str, float]]) -> None:
        if rows:
            columns = {key: [row[key] for row in rows] for key in rows[0]}
            self.found[name] = {key: {"median": statistics.median(all_), "all": all_} for key, all_ in columns.items()}
        if self.options.json:
            self.options.json.write_bytes(msgspec.json.format(msgspec.json.encode(self.found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--gpus", action="store_true", help="ready memory is mapped and pinned, as on a node with devices")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ehstaging-"))
    bench = None
    try:
        bench = Bench(options, directory)
        bench.phase("deposited", bench.deposited)
        bench.phase("staged", bench.staged)
        for name in ("deposited", "staged"):
            medians = {key: round(value["median"], 3) for key, value in bench.found.get(name, {}).items()}
            print(name, medians, f"n={len(bench.found[name]['ratio']['all']) if medians else 0}", flush=True)
    finally:
        if bench is not None:
            shutil.rmtree(bench.source)
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
