"""What slows a copy to a GPU: `python -m tests.bench.bench_copy [--gib 8] [--reps 5] [--json FILE]`.

Kinds of host memory, ways to queue, and what a neighbouring process does meanwhile (an engine that makes its KV memory or maps
weights), each alone, against the bus as a plain pinned copy shows it. Needs a GPU and cuda-python; root for huge pages.
"""

import argparse
import contextlib
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool.mapping import map_shared, unmap
from tests.bench.copyneighbour import KINDS, Neighbour

MIB = 1 << 20
LAYER = (50 * MIB, 34 * MIB, 202 * MIB, 100 * MIB)
"""Segments of one layer of an 8B shape."""
SMALL = 2 * MIB
TOUCHERS = 16
SETTLE_S = 0.15
"""Memory that is freed is wiped, and copies stand still meanwhile: not within what is measured next."""


@dataclass
class Host:
    """Host memory of one kind, a piece for each segment."""

    kind: str
    pieces: list[tuple[int, int]]
    """Address, size: pinned one by one."""
    close: Callable[[], None]


def sizes(total: int) -> list[int]:
    found = [SMALL] * 3
    while sum(found) < total:
        found += LAYER
    return found


# ---- host memory --------------------------------------------------------------------------------------------


def files(kind: str, directory: str | None, wanted: list[int], flags: int = 0) -> Iterator[Host]:
    """Touched, mapped and pinned, one file a segment, as the pool keeps them."""
    from pool.cuda import checked, driver

    fds = []
    for number, size in enumerate(wanted):
        if directory is None:
            fd = os.memfd_create(f"copy-{number}", flags)
        else:
            fd = os.open(f"{directory}/{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, size)
        fds.append(fd)
    begun = time.monotonic()
    with ThreadPoolExecutor(TOUCHERS) as threads:
        if directory is None:
            pieces = [(map_shared(os.dup(fd), size), size) for fd, size in zip(fds, wanted, strict=True)]
            import ctypes

            list(threads.map(lambda piece: ctypes.memset(piece[0], 7, piece[1]), pieces))
        else:
            list(threads.map(lambda pair: os.posix_fallocate(pair[0], 0, pair[1]), zip(fds, wanted, strict=True)))
            pieces = [(map_shared(os.dup(fd), size), size) for fd, size in zip(fds, wanted, strict=True)]
    touched = time.monotonic()
    for address, size in pieces:
        checked("register", driver.cuMemHostRegister(address, size, 1))
    pinned = time.monotonic()
    total = sum(wanted)
    print(f"  {kind}: touched at {total / (touched - begun) / 1e9:.1f} GB/s, pinned at {total / (pinned - touched) / 1e9:.1f}")

    def close() -> None:
        for address, size in pieces:
            checked("unregister", driver.cuMemHostUnregister(address))
            unmap(address, size)
        for fd in fds:
            os.close(fd)
        if directory is not None:
            for number in range(len(wanted)):
                os.unlink(f"{directory}/{number}")

    yield Host(kind, pieces, close)


def driver_memory(wanted: list[int]) -> Iterator[Host]:
    from pool.cuda import checked, driver

    pieces = [(int(checked("host alloc", driver.cuMemHostAlloc(size, 1))), size) for size in wanted]

    def close() -> None:
        for address, _ in pieces:
            checked("free", driver.cuMemFreeHost(address))

    yield Host("alloc", pieces, close)


def shared(wanted: list[int]) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield from files("shm", directory, wanted)


def transparent(wanted: list[int]) -> Iterator[Host]:
    """A file system of our own in shared memory that gives huge pages where it can."""
    with tempfile.TemporaryDirectory() as directory:
        size = sum(wanted) + (64 << 20)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"huge=always,size={size},mode=0700", "enginehouse-bench", directory], check=True
        )
        try:
            yield from files("thp", directory, wanted)
            lines = Path("/proc/meminfo").read_text().splitlines()
            print("  " + ", ".join(line for line in lines if "ShmemHuge" in line or "ShmemPmd" in line))
        finally:
            subprocess.run(["umount", "-l", directory], check=True)


def huge(wanted: list[int]) -> Iterator[Host]:
    """Pages of 2 MiB that the system keeps for whoever asks."""
    count = Path("/proc/sys/vm/nr_hugepages")
    before = count.read_text()
    count.write_text(str(-(-sum(wanted) // (2 * MIB)) + 8))
    try:
        yield from files("hugetlb", None, wanted, flags=0x0004 | 0x0001)
    finally:
        count.write_text(before)


HOSTS = {"alloc": driver_memory, "shm": shared, "thp": transparent, "hugetlb": huge}

# ---- the copy -----------------------------------------------------------------------------------------------


class Copier:
    """This process's device and the ways to queue a copy there."""

    def __init__(self, wanted: list[int]) -> None:
        from pool.cuda import CudaGpu, checked, driver

        self.gpu, self.checked, self.driver = CudaGpu(0), checked, driver
        self.sizes = wanted
        self.blocks: list[Any] = []
        self.streams = [checked("stream", driver.cuStreamCreate(1)) for _ in range(4)]
        self.start, self.end = [checked("event", driver.cuEventCreate(0)) for _ in range(2)]
        self.blocking = checked("event", driver.cuEventCreate(1))

    def make(self) -> None:
        self.blocks = [self.gpu.create(size) for size in self.sizes]

    def free(self) -> None:
        for block in self.blocks:
            self.gpu.destroy(block)
        self.blocks = []

    def queue(self, host: Host, way: str) -> None:
        match way:
            case "each":
                self._queue(host, lambda n: 0, max(self.sizes))
            case "2m" | "8m" | "32m" | "128m":
                self._queue(host, lambda n: 0, int(way[:-1]) * MIB)
            case "2streams" | "4streams":
                self._queue(host, lambda n: n % int(way[0]), max(self.sizes))
            case "batch":
                self._batch(host)
            case _:
                self._throttled(host, int(way.split()[1]))

    def _queue(self, host: Host, stream: Callable[[int], int], piece: int) -> None:
        number = 0
        for block, (address, size) in zip(self.blocks, host.pieces, strict=True):
            for at in range(0, size, piece):
                to = self.streams[stream(number)]
                call = self.driver.cuMemcpyHtoDAsync(block.address + at, address + at, min(piece, size - at), to)
                self.checked("copy", call)
                number += 1

    def _throttled(self, host: Host, most: int) -> None:
        """Never more than so many pieces of 32 MiB on their way: the engine that copies is free in between."""
        events = [self.checked("event", self.driver.cuEventCreate(2)) for _ in range(most)]
        number = 0
        for block, (address, size) in zip(self.blocks, host.pieces, strict=True):
            for at in range(0, size, 32 * MIB):
                if number >= most:
                    self.checked("wait", self.driver.cuEventSynchronize(events[number % most]))
                call = self.driver.cuMemcpyHtoDAsync(
                    block.address + at, address + at, min(32 * MIB, size - at), self.streams[0]
                )
                self.checked("copy", call)
                self.checked("record", self.driver.cuEventRecord(events[number % most], self.streams[0]))
                number += 1
        for event in events:
            self.checked("destroy", self.driver.cuEventDestroy(event))

    def _batch(self, host: Host) -> None:
        kind = self.driver.CUmemcpyAttributes()
        kind.srcAccessOrder = self.driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        to = [self.driver.CUdeviceptr(block.address) for block in self.blocks]
        of = [self.driver.CUdeviceptr(address) for address, _ in host.pieces]
        counts = [size for _, size in host.pieces]
        call = self.driver.cuMemcpyBatchAsync(to, of, counts, len(counts), [kind], [0], 1, self.streams[0])
        self.checked("batch", call)

    def timed(self, host: Host, way: str, *, blocking: bool = False, meanwhile: Callable[[], None] | None = None) -> float:
        """Milliseconds from the first queued to the last arrived, by the host's clock."""
        begun = time.monotonic()
        early = way.startswith("throttled")  # which returns when nearly all has arrived
        if early and meanwhile is not None:
            meanwhile()
        self.queue(host, way)
        if not early and meanwhile is not None:
            meanwhile()
        for stream in self.streams:
            if blocking:
                self.checked("record", self.driver.cuEventRecord(self.blocking, stream))
                self.checked("wait", self.driver.cuEventSynchronize(self.blocking))
            else:
                self.checked("wait", self.driver.cuStreamSynchronize(stream))
        return (time.monotonic() - begun) * 1000

    def filled(self, host: Host, order: str) -> dict[str, float]:
        """The whole of a wake in this process: memory made, copied, exported."""
        begun = time.monotonic()
        fds: list[int] = []
        made = begun
        if order != "made first":
            pairs = list(zip(self.sizes, host.pieces, strict=True))
            for size, (address, _) in sorted(pairs, key=lambda pair: -pair[0]) if order == "largest first" else pairs:
                block = self.gpu.create(size)
                self.blocks.append(block)
                call = self.driver.cuMemcpyHtoDAsync(block.address, address, size, self.streams[0])
                self.checked("copy", call)
                fds.append(self.gpu.export(block))
            made = time.monotonic()
        else:
            self.make()
            made = time.monotonic()
            self.queue(host, "each")
            fds += [self.gpu.export(block) for block in self.blocks]
        queued = time.monotonic()
        self.checked("wait", self.driver.cuStreamSynchronize(self.streams[0]))
        done = time.monotonic()
        for fd in fds:
            os.close(fd)
        self.free()
        freed = time.monotonic()
        points = {"made": made, "queued": queued, "done": done}
        return {name: (at - begun) * 1000 for name, at in points.items()} | {"free": (freed - done) * 1000}


# ---- the runs -----------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.sizes = sizes(int(options.gib * (1 << 30)))
        self.total = sum(self.sizes)
        self.rows: dict[str, Any] = {"bytes": self.total, "segments": len(self.sizes)}
        self.copier = Copier(self.sizes)
        self.bus = 0.0
        print(f"{self.total / 1e9:.2f} GB in {len(self.sizes)} segments", flush=True)

    def keep(self, name: str, milliseconds: list[float], **more: Any) -> None:
        rate = self.total / statistics.median(milliseconds) * 1000
        if name == "bus":
            self.bus = rate
        self.rows[name] = {"ms": [round(one, 2) for one in milliseconds], "gb_per_s": round(rate / 1e9, 2), **more}
        share = f"{100 * rate / self.bus:5.1f} %" if self.bus else ""
        low, high = min(milliseconds), max(milliseconds)
        row = f"{name:42s} {statistics.median(milliseconds):8.1f} ms ({low:.1f}-{high:.1f}) {rate / 1e9:6.2f} GB/s {share}"
        print(f"{row} {json.dumps(more) if more else ''}", flush=True)
        if self.options.json:
            Path(self.options.json).write_text(json.dumps(self.rows, indent=1))

    @contextlib.contextmanager
    def tried(self, name: str) -> Iterator[None]:
        """One failing part costs its own figures only."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.rows[name] = {"failed": repr(error)}

    def measure_bus(self, host: Host) -> None:
        """One copy of the largest pinned piece, again and again."""
        address, size = max(host.pieces, key=lambda piece: piece[1])
        block = self.copier.gpu.create(size)
        times = []
        for _ in range(self.options.reps * 4):
            begun = time.monotonic()
            for _ in range(8):
                call = self.copier.driver.cuMemcpyHtoDAsync(block.address, address, size, self.copier.streams[0])
                self.copier.checked("copy", call)
            self.copier.checked("wait", self.copier.driver.cuStreamSynchronize(self.copier.streams[0]))
            times.append((time.monotonic() - begun) * 1000 * self.total / (8 * size))
        self.copier.gpu.destroy(block)
        self.keep("bus", times[2:])

    def alone(self, host: Host) -> None:
        self.copier.make()
        ways = ("each", "8m", "32m", "128m", "2streams", "batch") if host.kind in {"alloc", "shm"} else ("each", "32m")
        for way in ways:
            with self.tried(f"{host.kind} {way}"):
                self.copier.timed(host, way)
                self.keep(f"{host.kind} {way}", [self.copier.timed(host, way) for _ in range(self.options.reps)])
        self.keep(f"{host.kind} each, blocking wait", [self.copier.timed(host, "each", blocking=True) for _ in range(3)])
        self.copier.free()
        for order in ("one by one", "largest first", "made first"):
            with self.tried(f"{host.kind} {order}"):
                found = []
                for _ in range(self.options.reps + 1):
                    time.sleep(SETTLE_S)
                    found.append(self.copier.filled(host, order))
                found = found[1:]
                more = {name: round(statistics.median(one[name] for one in found), 1) for name in found[0] if name != "done"}
                self.keep(f"{host.kind} with memory, {order}", [one["done"] for one in found], **more)

    def disturbed(self, host: Host, neighbour: Neighbour, kinds: tuple[str, ...], ways: tuple[str, ...]) -> None:
        self.copier.make()
        fds = [self.copier.gpu.export(block) for block in self.copier.blocks]
        for kind in kinds:
            for way in ways:
                with self.tried(f"{host.kind} {way} beside {kind}"):
                    quiet = statistics.median(self.copier.timed(host, way) for _ in range(3))
                    found, theirs = [], []
                    for _ in range(self.options.reps):
                        time.sleep(SETTLE_S)
                        neighbour.prepare(kind, fds, self.sizes)
                        found.append(self.copier.timed(host, way, meanwhile=neighbour.go))
                        theirs.append(neighbour.took_ms())
                        neighbour.undo()
                    more = {"theirs_ms": round(statistics.median(theirs), 1)}
                    stall = round(statistics.median(found) - quiet, 1)
                    self.keep(f"{host.kind} {way} beside {kind}", found, stall_ms=stall, **more)
        for fd in fds:
            os.close(fd)
        self.copier.free()

    def after_release(self, host: Host, neighbour: Neighbour) -> None:
        """How long a copy suffers from memory that was given back before it."""
        self.copier.make()
        for wait_ms in (0, 10, 20, 30, 50, 100):
            found = []
            for _ in range(self.options.reps):
                neighbour.prepare("release", [], [])
                time.sleep(SETTLE_S)
                neighbour.go()
                theirs = neighbour.took_ms()
                time.sleep(wait_ms / 1000)
                found.append(self.copier.timed(host, "each"))
                neighbour.undo()
            self.keep(f"{host.kind} {wait_ms} ms after a release", found, theirs_ms=round(theirs, 1))
        self.copier.free()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--hosts", default="alloc,shm,thp,hugetlb")
    parser.add_argument("--json")
    parser.add_argument("--neighbour", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.neighbour is not None:
        from tests.bench.copyneighbour import serve

        serve(socket.socket(fileno=options.neighbour))
        return
    for name in ("shmem_enabled", "enabled"):
        with contextlib.suppress(OSError):
            print(name, Path(f"/sys/kernel/mm/transparent_hugepage/{name}").read_text().strip())
    print(sys.version.split()[0], os.cpu_count(), "cores", f"page {mmap.PAGESIZE}", flush=True)
    bench = Bench(options)
    with Neighbour([sys.executable, "-m", "tests.bench.bench_copy"]) as neighbour:
        for kind in options.hosts.split(","):
            with bench.tried(kind):
                for host in HOSTS[kind](bench.sizes):
                    if kind == "alloc" or not bench.bus:
                        bench.measure_bus(host)
                    bench.alone(host)
                    if kind == "shm":
                        bench.disturbed(host, neighbour, KINDS, ("each",))
                        ways = ("2m", "8m", "32m", "throttled 1", "throttled 2", "throttled 4")
                        bench.disturbed(host, neighbour, ("import", "import by four"), ways)
                        bench.after_release(host, neighbour)
                    else:
                        bench.disturbed(host, neighbour, ("kv", "import"), ("each",))
                    host.close()


if __name__ == "__main__":
    main()
