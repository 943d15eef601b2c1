"""What a swap costs on a GPU: `python -m tests.bench.bench_gpu_swap --shape 8b --out FILE [--against l1,l2] [--cycles 7]`.

Bus rate, our cycles (step by step), a second fine-tune on the same skeleton, switches, a second engine on the same memory,
plain vLLM's sleep levels. Greedy tokens are compared after every step that could change them.
Needs a GPU, vLLM 0.26 and room for two checkpoints of the shape.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pool.client import Attachment
from pool.devicelink import attach_device
from tests.bench.swapengine import EngineProcess
from worker import gpus
from worker.engines.messages import Attach, Detach, Drain, Health, Sleep, Stage, Wake

GIB = 1 << 30
KV = {"tiny": 1 << 30, "1.5b": 8 << 30, "8b": 12 << 30}
TOKENS = 64


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work = Path(options.work)
        self.device = gpus.gpus()[0]
        self.socket = self.work / "pool" / "pool.sock"
        self.arguments = {"kv_bytes": KV[options.shape], "max_num_seqs": 256, "max_model_len": 4096}
        self.rows: dict[str, Any] = {"shape": options.shape, "device": self.device.name, **versions()}
        self.engine: EngineProcess | None = None
        self.sets: dict[str, str] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.pool_pid = 0

    def phase(self, name: str, work: Callable[[], Any]) -> None:
        """One failing phase costs its own figures only."""
        begun = time.monotonic()
        try:
            found = work()
        except Exception as error:
            traceback.print_exc()
            found = {"failed": repr(error)[:2000]}
        self.rows[name] = found
        self.rows.setdefault("phases_s", {})[name] = round(time.monotonic() - begun, 2)
        print(f"[{name}] {time.monotonic() - begun:.1f} s {json.dumps(found, default=str)[:1800]}", flush=True)
        Path(self.options.out).write_text(json.dumps(self.rows, indent=1, default=str))

    def model(self, name: str) -> Path:
        return self.work / f"{self.options.shape}-{name}"

    # ---- phases ---------------------------------------------------------------------------------------------

    def models(self) -> Any:
        argv = [sys.executable, "-m", "tests.bench.swapmodels"]
        runs = [
            subprocess.Popen([*argv, str(self.model(name)), self.options.shape, str(seed)])
            for name, seed in (("a", 1), ("b", 2))
        ]
        assert [run.wait() for run in runs] == [0, 0]
        return {name: sum(file.stat().st_size for file in self.model(name).glob("*.safetensors")) for name in "ab"}

    def bus(self) -> Any:
        code = (
            "import torch,time,json\n"
            "h=torch.empty(2<<30,dtype=torch.uint8,pin_memory=True); d=torch.empty_like(h,device='cuda'); r=[]\n"
            "for k in range(8):\n"
            "  torch.cuda.synchronize(); t=time.monotonic(); d.copy_(h,non_blocking=True); torch.cuda.synchronize()\n"
            "  r.append(h.numel()/(time.monotonic()-t))\n"
            "print(json.dumps(r[1:]))"
        )
        rates = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        return {"bytes_per_s": statistics.median(rates), "GiB_per_s": [round(rate / GIB, 2) for rate in rates]}

    def start(self) -> Any:
        self.engine = EngineProcess(self.work / "one", self.model("a"), self.device.uuid, self.arguments)
        state = self.engine.tell(Health())
        return {"start_s": self.engine.ready_s, "state": str(state), "device_bytes": gpus.used_bytes(self.device.uuid)}

    def stage(self, name: str) -> Any:
        assert self.engine is not None
        order = Stage(pool_socket=str(self.socket), source=str(self.model(name)), form=f"bench-{self.options.shape}")
        stocked, milliseconds = self.engine.timed(order)
        self.sets[name] = stocked.weight_set
        again, again_ms = self.engine.timed(order)
        return {
            "ms": milliseconds, "bytes": stocked.size_bytes, "read_bytes": stocked.read_bytes, "set": stocked.weight_set,
            "again_ms": again_ms, "same_set_again": again.weight_set == stocked.weight_set,
        }  # fmt: skip

    def cycles(self, name: str) -> Any:
        """Up and down again; the first token counts against a warm first token of the same prompt."""
        assert self.engine is not None
        engine, found = self.engine, []
        for number in range(self.options.cycles + 1):
            row, ids = self._cycle(engine, name, warm=number < 2)
            self.tokens.setdefault(name, ids)
            row["same_tokens"] = ids == self.tokens[name]
            found.append(row)
        return {"rows": found, "first_is_cold": found[0], "median": medians(found[1:])}

    def _cycle(self, engine: EngineProcess, name: str, *, warm: bool) -> tuple[dict[str, Any], tuple[int, ...]]:
        up, attach_ms = engine.timed(Attach(pool_socket=str(self.socket), weight_set=self.sets[name]))
        _, wake_ms = engine.timed(Wake(model=name))
        _, first_ms, _ = engine.generate(1)
        ids, _, _ = engine.generate(TOKENS)
        warm_ms = statistics.median(engine.generate(1)[1] for _ in range(5 if warm else 3))
        top = gpus.used_bytes(self.device.uuid)
        _, drain_ms = engine.timed(Drain(deadline_ms=5000))
        _, sleep_ms = engine.timed(Sleep())
        _, detach_ms = engine.timed(Detach())
        row = {
            "attach_ms": attach_ms, "copy_ms": up.copy_ms, "bytes_copied": up.bytes_copied, "wake_ms": wake_ms,
            "first_token_ms": first_ms, "warm_first_token_ms": warm_ms, "drain_ms": drain_ms, "sleep_ms": sleep_ms,
            "detach_ms": detach_ms, "device_bytes_up": top, "device_bytes_asleep": gpus.used_bytes(self.device.uuid),
            "cycle_ms": attach_ms + wake_ms + max(first_ms - warm_ms, 0) + drain_ms + sleep_ms + detach_ms,
            "engine_says": up.bytes_device,
        }  # fmt: skip
        return row, ids

    def switches(self, *, resident: bool) -> Any:
        """From one fine-tune to the other and back, awake all the time."""
        assert self.engine is not None
        engine, kept, found = self.engine, [], []
        if resident:
            for weight_set in self.sets.values():
                kept.append(attach_device(self.socket, weight_set, self.device.uuid, lambda attached, fds: None))
        try:
            engine.tell(Attach(pool_socket=str(self.socket), weight_set=self.sets["a"]))
            engine.tell(Wake(model="a"))
            engine.generate(TOKENS)
            warm_ms = statistics.median(engine.generate(1)[1] for _ in range(5))
            for name in ["b", "a"] * 4:
                _, ms = engine.timed(Attach(pool_socket=str(self.socket), weight_set=self.sets[name]))
                ids, first_ms, _ = engine.generate(TOKENS)
                found.append(
                    {"ms": ms, "with_first_token_ms": ms + first_ms - warm_ms, "same_tokens": ids == self.tokens[name]}
                )
            engine.tell(Sleep())
            engine.tell(Detach())
        finally:
            close(kept)
        return {"rows": found, "median": medians(found)}

    def throughput(self) -> Any:
        assert self.engine is not None
        engine = self.engine
        engine.tell(Attach(pool_socket=str(self.socket), weight_set=self.sets["a"]))
        engine.tell(Wake(model="a"))
        prompts = [(5 + number, 7, 9) for number in range(256)]
        rates = []
        for _ in range(3):
            begun = time.monotonic()
            engine.generate_all(prompts, 256)
            rates.append(256 * 256 / (time.monotonic() - begun))
        single = TOKENS * 4 / (engine.generate(TOKENS * 4)[2] / 1000)
        engine.tell(Sleep())
        engine.tell(Detach())
        return {"tokens_per_s_256": rates, "tokens_per_s_1": single}

    def shared(self) -> Any:
        """A second skeleton that reads no weights, on the memory of the first."""
        assert self.engine is not None
        first = self.engine
        second = EngineProcess(self.work / "two", self.model("a"), self.device.uuid, self.arguments, bare=True)
        try:
            first.tell(Attach(pool_socket=str(self.socket), weight_set=self.sets["a"]))
            first.tell(Wake(model="a"))
            second.tell(Attach(pool_socket=str(self.socket), weight_set=self.sets["a"]))
            second.tell(Detach())  # a skeleton starts with memory of its own under its weights, and gives it up here
            before = gpus.used_bytes(self.device.uuid)
            up, ms = second.timed(Attach(pool_socket=str(self.socket), weight_set=self.sets["a"]))
            second.tell(Wake(model="a"))
            after = gpus.used_bytes(self.device.uuid)
            ids, _, _ = second.generate(TOKENS)
            ours, _, _ = first.generate(TOKENS)
            return {
                "bare_start_s": second.ready_s, "attach_ms": ms, "bytes_copied": up.bytes_copied, "bytes_before": before,
                "bytes_after": after, "added_bytes": after - before, "kv_bytes": up.bytes_kv,
                "same_tokens": ids == ours == self.tokens["a"], "processes": gpus.processes(self.device.uuid),
            }  # fmt: skip
        finally:
            second.end()
            first.tell(Sleep())
            first.tell(Detach())

    def endurance(self, count: int) -> Any:
        """Many cycles: nothing may grow."""
        assert self.engine is not None
        engine = self.engine

        def cycle() -> None:
            engine.tell(Attach(pool_socket=str(self.socket), weight_set=self.sets["a"]))
            engine.tell(Wake(model="a"))
            engine.generate(1)
            engine.tell(Sleep())
            engine.tell(Detach())

        for _ in range(10):
            cycle()
        before = self.footprint()
        begun = time.monotonic()
        for _ in range(count):
            cycle()
        return {
            "cycles": count,
            "ms_each": (time.monotonic() - begun) * 1000 / count,
            "before": before,
            "after": self.footprint(),
        }

    def footprint(self) -> dict[str, int]:
        assert self.engine is not None
        found = {"device_bytes": gpus.used_bytes(self.device.uuid)}
        for name, pid in (("engine", self.engine.process.pid), ("pool", self.pool_pid)):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found[f"{name}_rss_kib"] = int(status["RssAnon"].split()[0])
            found[f"{name}_threads"] = int(status["Threads"])
            found[f"{name}_descriptors"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return found

    def plain(self, name: str, levels: str) -> Any:
        result = self.work / f"plain-{name}.json"
        argv = [sys.executable, "-m", "tests.bench.swapplain", str(self.model(name)), str(result), str(self.options.cycles)]
        argv += [json.dumps(self.arguments), levels]
        run = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        if not result.exists():
            raise RuntimeError(run.stdout[-1500:] + run.stderr[-2500:])
        rows = json.loads(result.read_text())
        rows["same_tokens_as_ours"] = tuple(rows.pop("tokens")) == self.tokens.get(name)
        for level in ("level1", "level2"):
            if level in rows:
                for row in rows[level]:
                    row["cycle_ms"] = row["sleep_ms"] + row["wake_ms"] + max(row["first_token_ms"] - rows["first_token_ms"], 0)
                rows[f"{level}_first"] = rows[level][0]
                rows[level] = medians(rows[level][1:])
        return rows


def close(kept: list[Attachment]) -> None:
    for one in kept:
        one.close()


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of numbers the median and the range, of truths whether all hold."""
    found: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows if row[name] is not None]
        if values and all(isinstance(value, bool) for value in values):
            found[name] = all(values)
        elif values:
            found[name] = [round(value, 2) for value in (statistics.median(values), min(values), max(values))]
    return found


def versions() -> dict[str, Any]:
    import importlib.metadata as metadata

    import pynvml

    found = {name: metadata.version(name) for name in ("vllm", "torch", "cuda-bindings")}
    pynvml.nvmlInit()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=list(KV))
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", default="/tmp/bench_swap")
    parser.add_argument("--against", default="l1,l2", help="plain vLLM: l1, l2, t (throughput), b (tokens of the second model)")
    parser.add_argument("--cycles", type=int, default=7)
    parser.add_argument("--endurance", type=int, default=0, help="cycles after which nothing may have grown")
    parser.add_argument("--without", default="", help="phases to leave out: shared, throughput")
    options = parser.parse_args()
    bench = Bench(options)
    (bench.work / "pool").mkdir(parents=True, exist_ok=True, mode=0o700)
    bench.phase("models", bench.models)
    bench.phase("bus", bench.bus)
    argv = [sys.executable, "-m", "pool.daemon", "--socket", str(bench.socket), "--directory", str(bench.work / "pool")]
    with (bench.work / "pool.log").open("wb") as log:
        daemon = subprocess.Popen([*argv, "--budget", str(60 << 30), "--gpus", "--forget"], stderr=log)
    bench.pool_pid = daemon.pid
    try:
        bench.phase("start", bench.start)
        bench.phase("stage_a", lambda: bench.stage("a"))
        bench.phase("cycles_a", lambda: bench.cycles("a"))
        bench.phase("stage_b", lambda: bench.stage("b"))
        bench.phase("cycles_b", lambda: bench.cycles("b"))
        bench.phase("cycles_a_after_b", lambda: bench.cycles("a"))
        bench.phase("switches", lambda: bench.switches(resident=False))
        bench.phase("switches_resident", lambda: bench.switches(resident=True))
        if options.endurance:
            bench.phase("endurance", lambda: bench.endurance(options.endurance))
        if "throughput" not in options.without:
            bench.phase("throughput", bench.throughput)
        if "shared" not in options.without:
            bench.phase("shared", bench.shared)
        if bench.engine is not None:
            bench.engine.end()
            print(bench.engine.log.read_text()[-3000:])
        levels = "".join(mark for mark in "12t" if (f"l{mark}" if mark != "t" else mark) in options.against.split(","))
        if options.against:
            bench.phase("plain_a", lambda: bench.plain("a", levels))
        if "b" in options.against.split(","):
            bench.phase("plain_b", lambda: bench.plain("b", ""))
    finally:
        print((bench.work / "pool.log").read_text()[-4000:])
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(20)


if __name__ == "__main__":
    main()
    os._exit(0)
