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
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.copier import Copier
from tests.bench.copyhosts import HOSTS, Host, sizes
from tests.bench.copyneighbour import KINDS, Neighbour

SETTLE_S = 0.15
"""Memory that is freed is wiped, and copies stand still meanwhile: not within what is measured next."""


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
