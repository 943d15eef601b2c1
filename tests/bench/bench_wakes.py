"""Wakes as the pool sees them: `python -m tests.bench.bench_wakes [--gib 8] [--wakes 20] [--json FILE]`.

A set on its way to a GPU, alone, beside another set's staging, beside a neighbour that decodes; over one link and, where there
are several GPUs, over those of idle and of decoding neighbours. Rates beside the bus of the same run. Needs a GPU, torch.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pool.devicelink import attach_device, exchange
from pool.messages import Filled
from pool.place import place
from tests.bench.bench_copy import SETTLE_S
from tests.bench.copyhosts import sizes
from tests.bench.wakeloads import beside, bring, decode_for_ever, rate_between, request, stage_for_ever
from tests.poolroom import Daemon, wait_for
from worker import gpus

STAGED = 120
"""Wakes beside staging: a 99th percentile of fewer than a hundred is the slowest."""


def _p99(ascending: list[float]) -> float:
    """The nearest rank."""
    return ascending[math.ceil(0.99 * len(ascending)) - 1]


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.path = Path(tempfile.mkdtemp(prefix="ehwakes-"))
        self.wanted = sizes(int(options.gib * (1 << 30)))
        self.total = sum(self.wanted)
        self.devices = [gpu.uuid for gpu in gpus.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))]
        self.rows: dict[str, Any] = {"bytes": self.total, "segments": len(self.wanted), "devices": len(self.devices)}
        self.bus = 0.0
        self.daemon: Daemon | None = None
        self.weight_set = self.other = ""

    def phase(self, name: str, work: Callable[[], Any]) -> None:
        """One failing phase costs its own figures only."""
        begun = time.monotonic()
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            found = {"failed": repr(error)[:1000]}
        self.rows[name] = found
        print(f"[{time.monotonic() - begun:6.1f} s] {name}: {json.dumps(found)}", flush=True)
        if self.options.json:
            Path(self.options.json).write_text(json.dumps(self.rows, indent=1))

    # ---- phases ---------------------------------------------------------------------------------------------

    def measure_bus(self) -> Any:
        """Each link alone, and all at once: plain copies from memory that the driver has given."""
        code = (
            "import torch,time,json,threading\n"
            "n=torch.cuda.device_count(); S=2<<30\n"
            "H=[torch.empty(S,dtype=torch.uint8,pin_memory=True) for _ in range(n)]\n"
            "D=[torch.empty(S,dtype=torch.uint8,device=f'cuda:{i}') for i in range(n)]\n"
            "def go(which):\n"
            "  [torch.cuda.synchronize(i) for i in which]; t=time.monotonic()\n"
            "  for k in range(3): [D[i].copy_(H[i],non_blocking=True) for i in which]\n"
            "  [torch.cuda.synchronize(i) for i in which]; return 3*S*len(which)/(time.monotonic()-t)\n"
            "r={f'alone {i}':sorted(go([i]) for _ in range(6))[3] for i in range(n)}\n"
            "r['together']=sorted(go(range(n)) for _ in range(6))[3]\n"
            "print(json.dumps(r))"
        )
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        found = json.loads(run.stdout) if run.returncode == 0 else {"failed": run.stderr[-800:]}
        self.bus = found.get("alone 0", 0.0)
        return found

    def start(self, *extra: str) -> Any:
        directory = self.path / "pool"
        directory.mkdir(mode=0o700, exist_ok=True)
        self.daemon = Daemon(directory, budget=6 * self.total, extra=("--gpus", *extra)).start()
        return {}

    def end(self) -> None:
        if self.daemon is not None:
            self.daemon.stop()
            (self.path / "pool" / "log").rename(self.path / f"pool-{time.monotonic()}.log")

    def first(self) -> Any:
        assert self.daemon is not None
        self.weight_set, seconds = bring(self.daemon.socket, request(self.path, "first", self.wanted), 1)
        begun = time.monotonic()
        wait_for(lambda: self.daemon.events("registered"), 60)  # type: ignore[union-attr]
        return {**seconds, "pinned_s": time.monotonic() - begun}

    def attach(self) -> tuple[float, Filled, float]:
        assert self.daemon is not None
        begun = time.monotonic()
        attachment = attach_device(self.daemon.socket, self.weight_set, self.devices[0], lambda attached, fds: None)
        took = time.monotonic() - begun
        filled = attachment.filled
        assert filled is not None
        begun = time.monotonic()
        attachment.release()
        return took * 1000, filled, (time.monotonic() - begun) * 1000

    def wakes(self, count: int, *, settled: bool = False) -> dict[str, Any]:
        """settled: not right behind the release of as much memory, which the driver wipes while it is copied to."""
        found = []
        for _ in range(count):
            threading.Event().wait(SETTLE_S if settled else 0)
            found.append(self.attach())
        took = sorted(one[0] for one in found)
        copy = statistics.median(one[1].took_ms for one in found)
        rate = self.total / copy * 1000
        assert self.daemon is not None
        row = {
            "wake_p50_ms": statistics.median(took), "wake_p99_ms": _p99(took), "worst_ms": took[-1], "copy_ms": copy,
            "gb_per_s": rate / 1e9, "of_bus": rate / self.bus if self.bus else None,
            "release_ms": statistics.median(one[2] for one in found),
            "links": {shard.via: shard.copied_bytes for shard in found[-1][1].shards}, "path": found[-1][1].path,
            "shard_ms": {shard.via: shard.took_ms for shard in found[-1][1].shards}, "n": count,
            "made_ms": statistics.median(one[1].made_ms for one in found),
            "worst_copy_ms": max(one[1].took_ms for one in found),
            "worst_wait_ms": max(float(event["waited_s"]) for event in self.daemon.events("filled")[-count:]) * 1000,
        }  # fmt: skip
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}

    def alone(self) -> Any:
        self.attach()
        return {"back to back": self.wakes(self.options.wakes), "settled": self.wakes(self.options.wakes, settled=True)}

    def again(self) -> Any:
        return self.wakes(self.options.wakes)

    def in_place(self) -> Any:
        """Two sets of one layout take turns in memory that stays mapped."""
        assert self.daemon is not None
        if not self.other:
            pinned = len(self.daemon.events("registered"))
            self.other, _ = bring(self.daemon.socket, request(self.path, "second", self.wanted), 2)
            wait_for(lambda: len(self.daemon.events("registered")) > pinned, 60)  # type: ignore[union-attr]
        attachment = attach_device(self.daemon.socket, self.weight_set, self.devices[0], lambda attached, fds: None)
        took, copies = [], []
        for number in range(self.options.wakes):
            begun = time.monotonic()
            attachment = exchange(attachment, self.weight_set if number % 2 else self.other)
            took.append((time.monotonic() - begun) * 1000)
            assert attachment.filled is not None
            copies.append(attachment.filled)
        attachment.release()
        copy = statistics.median(one.took_ms for one in copies)
        rate = self.total / copy * 1000
        return {
            "switch_p50_ms": statistics.median(took), "switch_p99_ms": _p99(sorted(took)), "copy_ms": copy,
            "gb_per_s": rate / 1e9, "of_bus": rate / self.bus if self.bus else None, "n": len(took), "path": copies[-1].path,
            "links": {shard.via: shard.copied_bytes for shard in copies[-1].shards},
            "shard_ms": {shard.via: shard.took_ms for shard in copies[-1].shards},
        }  # fmt: skip

    def beside_staging(self) -> Any:
        assert self.daemon is not None
        told = self.path / "staged"
        arguments = (str(self.daemon.socket), str(self.path), self.wanted, str(told))
        with beside(stage_for_ever, *arguments):
            wait_for((self.path / "other").exists, 60)
            found = self.wakes(max(self.options.wakes * 2, STAGED))
            wait_for(told.exists, 60)
        return {**found, "stagings": [json.loads(line) for line in told.read_text().splitlines()][:3]}

    def beside_decoding(self, uuid: str, work: Callable[[], Any], *neighbour: str) -> Any:
        """What the neighbour loses, and what the wake does. neighbour: more that `decode_for_ever` is told."""
        told = self.path / f"decoded-{time.monotonic()}"
        told.touch()
        with beside(decode_for_ever, uuid, str(told), *neighbour):
            wait_for(lambda: told.stat().st_size > 2000, 120)
            begun = time.monotonic()
            threading.Event().wait(2.0)
            quiet = rate_between(told, begun, time.monotonic())
            begun = time.monotonic()
            found = work()
            ended = time.monotonic()
            busy = rate_between(told, begun, ended)
            threading.Event().wait(1.5)
            after = rate_between(told, ended + 0.2, time.monotonic())
        copying = found["copy_ms"] * found["n"] / ((ended - begun) * 1000)
        lost = 1 - busy / max(statistics.mean((quiet, after)), 1e-9)
        rates = [round(one, 1) for one in (quiet, busy, after)]
        return {**found, "tokens_per_s": rates, "lost": lost, "copying_share": copying, "lost_while_copying": lost / copying}

    def beside_engine(self) -> Any:
        """Likewise, but the neighbour has a set there: copies keep to the part of the link's rate that is theirs then."""
        assert self.daemon is not None
        return self.beside_decoding(self.devices[0], self.again, str(self.daemon.socket), self.other)

    def beside_resting(self) -> Any:
        """Somebody has a set there and rests, as most do, and copies came a moment ago: nothing is slowed."""
        assert self.daemon is not None
        held = attach_device(self.daemon.socket, self.other, self.devices[0], lambda attached, fds: None)
        try:
            return self.again()
        finally:
            held.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--wakes", type=int, default=20)
    parser.add_argument("--json")
    parser.add_argument("--without", default="", help="phases to leave out: staging, decoding")
    options = parser.parse_args()
    bench = Bench(options)
    bench.phase("bus", bench.measure_bus)
    bench.phase("start", bench.start)
    bench.phase("first", bench.first)
    several = len(bench.devices) > 1
    bench.phase("links alone" if several else "alone", bench.alone)
    bench.phase("links in place" if several else "in place", bench.in_place)
    if several and "decoding" not in options.without:
        bench.phase("helper decodes", lambda: bench.beside_decoding(bench.devices[1], bench.in_place))
    if several:
        bench.end()
        bench.phase("start without helpers", lambda: bench.start("--no-helpers"))
        wait_for(lambda: bench.daemon is not None and bench.daemon.events("registered"), 60)
        bench.phase("alone", bench.alone)
        bench.phase("in place", bench.in_place)
    if "decoding" not in options.without:
        bench.phase("target decodes, copies alone", lambda: bench.beside_decoding(bench.devices[0], bench.in_place))
        bench.phase("target decodes, wakes", lambda: bench.beside_decoding(bench.devices[0], bench.again))
        bench.phase("target decodes, its engine has a set there, wakes", bench.beside_engine)
        bench.phase("an engine that rests has a set there, wakes", bench.beside_resting)
    if "staging" not in options.without:
        bench.phase("beside staging", bench.beside_staging)
    bench.end()
    for log in bench.path.glob("pool*.log"):
        print(*[line for line in log.read_text().splitlines() if "ready_ahead" in line], sep="\n")
        print(log.read_text()[-1500:])
    shutil.rmtree(place(bench.path / "pool", 0))
    shutil.rmtree(bench.path)


if __name__ == "__main__":
    main()
