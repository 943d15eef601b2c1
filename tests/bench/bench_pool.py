"""Staging beside a bare parallel copy of the same bytes, each into memory that is ready and memory that is not; attach, detach.

`python -m tests.bench.bench_pool [--mib 512] [--cycles 20]` prints a table and, with `--json FILE`, keeps it.
"""

import argparse
import asyncio
import os
import platform
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from pool.client import attach
from pool.mapping import Reservation
from pool.stage import CHUNK_BYTES, READERS
from tests.poolroom import MIB, Daemon, write_safetensors


def copy_into(target: Path, source: Path, *, fresh: bool) -> float:
    """Seconds of the plainest parallel copy that hashes nothing: one buffer a thread, read and write."""
    size = source.stat().st_size
    if fresh:
        target.unlink(missing_ok=True)
    from_fd, to_fd = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
    share = -(-size // READERS // CHUNK_BYTES) * CHUNK_BYTES

    def part(number: int) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        for at in range(number * share, min((number + 1) * share, size), CHUNK_BYTES):
            got = os.preadv(from_fd, [buffer], at)
            os.pwrite(to_fd, buffer[:got], at)

    begun = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(part, range(READERS)))
    took = time.perf_counter() - begun
    os.close(from_fd)
    os.close(to_fd)
    return took


async def staging(daemon: Daemon, source: Path, *, ready: bool = False) -> tuple[float, str, int]:
    """Seconds, the set, its bytes. ready: wait until as much memory lies ready."""
    size = source.joinpath("model.safetensors").stat().st_size
    async with daemon.client() as client:
        ends = time.monotonic() + 60
        while ready and (await client.describe()).ready_bytes < size * 0.98:
            if time.monotonic() > ends:
                raise TimeoutError("nothing lies ready")
            await asyncio.sleep(0.05)
        staged = await client.stage(source)
        return staged.took_ms / 1000, staged.weight_set, staged.size_bytes


def mapping(daemon: Daemon, weight_set: str, size: int, cycles: int) -> dict[str, list[float]]:
    reservation = Reservation(size)
    view = reservation.view(0, size)
    times: dict[str, list[float]] = {"ask": [], "map": [], "touch": [], "unmap": [], "map and populate": []}
    for _ in range(cycles):
        points = [time.perf_counter()]
        attachment = attach(daemon.socket, weight_set)
        points.append(time.perf_counter())
        reservation.attach(attachment.fds, attachment.attached.segments)
        points.append(time.perf_counter())
        view[::4096].sum()
        points.append(time.perf_counter())
        reservation.detach()
        points.append(time.perf_counter())
        reservation.attach(attachment.fds, attachment.attached.segments, populate=True)
        points.append(time.perf_counter())
        reservation.detach()
        attachment.close()
        for name, before, after in zip(times, points[:-1], points[1:], strict=True):
            times[name].append((after - before) * 1000)
    return times


def spread(values: list[float], unit: str) -> dict[str, float | str]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "n": len(values), "unit": unit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="ehbench-"))
    source = directory / "source"
    source.mkdir()
    random = np.random.default_rng(0)
    each = options.mib * MIB // 16
    tensors = {f"layer.{n}.weight": random.integers(0, 255, each, dtype=np.uint8) for n in range(16)}
    write_safetensors(source / "model.safetensors", tensors)
    budget = 4 * options.mib * MIB
    (directory / "ready").mkdir(mode=0o700)
    fresh = Daemon(directory, budget=budget, extra=("--forget", "--ready", "0")).start()
    ready = Daemon(directory / "ready", budget=budget, extra=("--forget", "--ready", str(budget // 2))).start()
    target = fresh.root / "yardstick"
    figures: dict[str, list[float]] = {
        "stage, fresh memory": [], "stage, ready memory": [], "copy, fresh memory": [], "copy, ready memory": [],
    }  # fmt: skip
    try:
        _, weight_set, size = asyncio.run(staging(ready, source))
        asyncio.run(drop(ready, weight_set))
        for _ in range(options.cycles):  # turn by turn, so that what disturbs one disturbs the others
            figures["copy, fresh memory"].append(copy_into(target, source / "model.safetensors", fresh=True))
            figures["copy, ready memory"].append(copy_into(target, source / "model.safetensors", fresh=False))
            target.unlink()
            for daemon, name in ((fresh, "stage, fresh memory"), (ready, "stage, ready memory")):
                took, weight_set, size = asyncio.run(staging(daemon, source, ready=daemon is ready))
                figures[name].append(took)
                asyncio.run(drop(daemon, weight_set))
        _, weight_set, size = asyncio.run(staging(fresh, source))
        times = mapping(fresh, weight_set, size, options.cycles)
    finally:
        fresh.stop()
        ready.stop()
        shutil.rmtree(directory)
    rows = {name: spread([options.mib / seconds for seconds in took], "MiB/s") for name, took in figures.items()}
    rows |= {f"{name}, {options.mib} MiB": spread(values, "ms") for name, values in times.items()}
    for name, row in rows.items():
        print(f"{name:24s} {row['median']:10.2f} {row['unit']:6s} ({row['low']:.2f} .. {row['high']:.2f}, n={row['n']})")
    if options.json:
        machine = {"machine": platform.platform(), "cores": os.cpu_count(), "mib": options.mib}
        head = {"at": datetime.now(UTC).isoformat(), **machine}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode({**head, "rows": rows})))


async def drop(daemon: Daemon, weight_set: str) -> None:
    async with daemon.client() as client:
        await client.drop(weight_set)


if __name__ == "__main__":
    main()
