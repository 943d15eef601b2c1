"""How fast a set comes into memory that lies ready: `python -m tests.bench.bench_staging [--gib 1] [--cycles 5] [--gpus]`.

Two ways in: files that are staged (read from the page cache, hashed, laid out), and a deposit (eight threads of another process
write, the daemon hashes behind them). Beside each, turn by turn in the same run, the yardstick: a bare parallel memcpy of as
many bytes by as many threads, from touched memory into segments of the same kind, mapped and touched. Medians of pairs.

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
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pool.huge import allocate, in_huge_pages
from pool.mapping import map_shared, unmap
from pool.stage import CHUNK_BYTES, READERS
from tests.bench.bench_pool import drop
from tests.bench.wakeloads import WRITERS, bring, request
from tests.poolroom import MIB, Daemon, write_safetensors

LAYER = (34, 8, 8, 34, 100, 100, 100)
"""MiB of a layer's large tensors, as in a model of 8B; small ones beside them."""


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
        self._from[:] = bytes(MIB) * (size // MIB) + bytes(size % MIB)
        path = directory / "yardstick"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        allocate(fd, 0, size)
        self.huge = in_huge_pages(fd, size)
        path.unlink()
        self._to = map_shared(fd, size)
        self.copy(2)

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


async def ready(daemon: Daemon, size: int, *, pinned: bool) -> None:
    """Until as much memory lies ready, pinned where there are devices."""
    async with asyncio.timeout(120), daemon.client() as client:
        while (await client.describe()).ready_bytes < size * 0.98:
            await asyncio.sleep(0.05)
        while pinned and (not (ahead := daemon.events("ready_ahead")) or int(str(ahead[-1]["pinned"])) < size * 0.98):
            await asyncio.sleep(0.05)


async def stage(daemon: Daemon, source: Path) -> str:
    async with daemon.client() as client:
        return (await client.stage(source)).weight_set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--gpus", action="store_true", help="ready memory is mapped and pinned, as on a node with devices")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ehstaging-"))
    source = directory / "source"
    source.mkdir()
    random = np.random.default_rng(0)
    sizes = shape(int(options.gib * (1 << 30)))
    tensors = {f"t{number:04d}": random.integers(0, 255, size, dtype=np.uint8) for number, size in enumerate(sizes)}
    write_safetensors(source / "model.safetensors", tensors)
    total = sum(sizes)
    (directory / "pool").mkdir(mode=0o700)
    extra = ("--forget", "--ready", str(2 * total), *(("--gpus",) if options.gpus else ()))
    daemon = Daemon(directory / "pool", budget=4 * total, extra=extra).start()
    yardstick = Yardstick(daemon.root, total)
    order = request(directory, "deposit", [-(-size // (2 * MIB)) * 2 * MIB for size in sizes if size >= MIB])
    rows: dict[str, list[dict[str, float]]] = {"staged": [], "deposited": []}
    try:
        for name, threads in (("staged", READERS), ("deposited", WRITERS)):
            for number in range(options.cycles + 2):  # the first ones leave memory of the sizes that the next ones find ready
                if number > 1:
                    asyncio.run(ready(daemon, total, pinned=options.gpus))
                yard, yard_spent = yardstick.copy(threads)
                before, own, begun = spent(daemon.pid), time.process_time(), time.perf_counter()
                if name == "staged":
                    weight_set, bytes_ = asyncio.run(stage(daemon, source)), total
                    took = time.perf_counter() - begun
                else:
                    weight_set, seconds = bring(daemon.socket, order, 7 + number)
                    took, bytes_ = sum(seconds.values()), sum(order.segments)
                used = spent(daemon.pid) - before + time.process_time() - own
                asyncio.run(drop(daemon, weight_set))
                if number > 1:
                    yard, yard_spent = (value * bytes_ / total for value in (yard, yard_spent))
                    rows[name].append(
                        {
                            "gb_per_s": bytes_ / took / 1e9, "yardstick_gb_per_s": bytes_ / yard / 1e9, "ratio": yard / took,
                            "cpu_s_per_gb": used / bytes_ * 1e9, "yardstick_cpu_s_per_gb": yard_spent / bytes_ * 1e9,
                        }
                    )  # fmt: skip
    finally:
        yardstick.close()
        daemon.stop()
        shutil.rmtree(directory)
    found: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(), "machine": platform.platform(), "cores": os.cpu_count(), "bytes": total,
        "threads": {"staged": READERS, "deposited": WRITERS}, "huge": yardstick.huge,
    }  # fmt: skip
    for name, cycles in rows.items():
        found[name] = {
            key: {"median": statistics.median(one[key] for one in cycles), "all": [round(one[key], 4) for one in cycles]}
            for key in cycles[0]
        }
        print(name, {key: round(value["median"], 3) for key, value in found[name].items()}, f"n={len(cycles)}", flush=True)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))


if __name__ == "__main__":
    main()
