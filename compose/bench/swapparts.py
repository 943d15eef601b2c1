"""The parts of a swap's measurement, one method each; each returns rows of figures. Milliseconds and bytes unless named."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from compose.bench.engineprocess import EngineProcess, Generated
from compose.bench.holdings import held
from compose.bench.load import MANY, PROMPTS, TOKENS
from compose.bench.plainprocess import PlainProcess
from compose.bench.rows import Row, medians
from compose.bench.scene import Scene
from pool.client import Attachment
from pool.devicelink import attach_device
from worker import gpus
from worker.engines.messages import Attach, Detach, Drain, Health, Sleep, Wake

_BUS: Final = """
import torch, time, json
devices = range(torch.cuda.device_count())
hs = [torch.empty(2 << 30, dtype=torch.uint8, pin_memory=True) for _ in devices]
ds = [torch.empty_like(h, device=f"cuda:{n}") for n, h in enumerate(hs)]
def rates(used):
    found = []
    for k in range(8):
        for n in used: torch.cuda.synchronize(n)
        t = time.monotonic()
        for n in used: ds[n].copy_(hs[n], non_blocking=True)
        for n in used: torch.cuda.synchronize(n)
        found.append(len(used) * hs[0].numel() / (time.monotonic() - t))
    return found[1:]
print(json.dumps([rates(devices[:1]), rates(devices)]))
"""


class SwapParts:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.sets: dict[str, str] = {}
        self.tokens: dict[str, tuple[int, ...]] = {}
        """Greedy ids of each checkpoint, as the first engine gave them."""
        self._engine: EngineProcess | None = None
        self._plain: PlainProcess | None = None

    @property
    def engine(self) -> EngineProcess:
        if self._engine is None:
            raise RuntimeError("the engine did not start")
        return self._engine

    def bus(self) -> Row:
        """Bytes/s from pinned memory to the first device, and to all of them at once."""
        visible = ",".join(one.uuid for one in self.scene.setting.devices)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        run = subprocess.run(
            [sys.executable, "-c", _BUS], capture_output=True, text=True, check=True, timeout=120, env=environment
        )
        alone, together = ([statistics.median(rates), min(rates), max(rates)] for rates in json.loads(run.stdout))
        return {"bytes_per_s": alone, "links_bytes_per_s": together}

    def start(self) -> Row:
        """A skeleton's start, reading its first weights included where the engine reads them itself."""
        self._engine = self.scene.start_engine("one")
        state = self.engine.tell(Health())
        return {"start_s": self.engine.ready_s, "engine_bytes": state.bytes_device, **self._used("device_bytes")}

    def stage(self, name: str) -> Row:
        """Bring a checkpoint into the pool, twice: the second time it is there."""
        self.sets[name], row = self.scene.stage(self.engine, name)
        again, repeated = self.scene.stage(self.engine, name)
        return {**row, "again_ms": repeated["ms"], "same_set_again": again == self.sets[name], "set": self.sets[name]}

    # ---- cycles ---------------------------------------------------------------------------------------------

    def cycles(self, name: str) -> Row:
        """Up and down again; the first token counts against a warm first token of the same prompt."""
        found = [self._cycle(name) for _ in range(self.scene.setting.cycles + 1)]
        return {"first": found[0], "median": medians(found[1:]), "rows": found, "ids": self.tokens[name]}

    def _cycle(self, name: str) -> Row:
        engine = self.engine
        up, attach_ms = engine.timed(self._attach(name))
        _, wake_ms = engine.timed(Wake(model=name))
        first_ms = engine.generate(1).first_ms
        ids = engine.generate(TOKENS).ids
        warm_ms = self._warm_ms()
        # Counted here and not asleep: an attach comes right behind a detach, when the driver wipes what was given back.
        top = {**self._used("device_bytes_up"), **held("engine", engine.process.pid), **self._daemon()}
        _, drain_ms = engine.timed(Drain(deadline_ms=5000))
        _, sleep_ms = engine.timed(Sleep())
        _, detach_ms = engine.timed(Detach())
        added_ms = max(first_ms - warm_ms, 0)
        up_ms = attach_ms + wake_ms + added_ms
        return {
            "cycle_ms": up_ms + drain_ms + sleep_ms + detach_ms, "up_ms": up_ms, "attach_ms": attach_ms,
            "copy_ms": up.copy_ms, "wake_ms": wake_ms, "first_token_added_ms": added_ms, "drain_ms": drain_ms,
            "sleep_ms": sleep_ms, "detach_ms": detach_ms, "warm_first_token_ms": warm_ms, "bytes_copied": up.bytes_copied,
            "same_tokens": ids == self.tokens.setdefault(name, ids), **top, **self._used("device_bytes_asleep"),
            "graphs": up.graphs, "graphs_again": engine.tell(Health()).graphs_again,
        }  # fmt: skip

    def switches(self, *, resident: bool) -> Row:
        """From one fine-tune to the other and back, awake all the time."""
        with self._kept(resident), self._up("a") as engine:
            engine.generate(TOKENS)
            warm_ms = self._warm_ms()
            found = []
            for name in ["b", "a"] * max(3, self.scene.setting.cycles // 2):
                ms = self._switch(name)
                said = engine.generate(TOKENS)
                added_ms = max(said.first_ms - warm_ms, 0)
                row = {"switch_ms": ms, "first_token_added_ms": added_ms, "same_tokens": said.ids == self.tokens[name]}
                found.append(row)
        return {"median": medians(found), "rows": found}

    # ---- beside it ------------------------------------------------------------------------------------------

    def start_plain(self) -> Row:
        """vLLM as it is, on the same GPU, with a checkpoint of its own copy: it stays for what is compared with it."""
        self._plain = PlainProcess(
            self.scene.setting.work, self.scene.sources["a"], self.scene.device, self.scene.arguments
        )  # fmt: skip
        return {"start_s": self.plain.start_s, **self._compared(self.plain, "a")}

    @property
    def plain(self) -> PlainProcess:
        if self._plain is None:
            raise RuntimeError("plain vLLM did not start")
        return self._plain

    def throughput(self) -> Row:
        """Tokens/s at many sequences and at one; by turns with plain vLLM, if that is there."""
        found: Row = {"many": [], "one": [], "plain_many": [], "plain_one": []}
        with self._up("a") as engine:
            engine.generate_all(PROMPTS, MANY)  # what is compiled, and memory taken, at the first time
            for kind, times in (("many", 5), ("one", 3)):
                for _ in range(times):
                    run = engine.generate_all(PROMPTS if kind == "many" else PROMPTS[:1], MANY)
                    found[kind].append(len(run) * MANY / _seconds(run))
                    if self._plain is not None:
                        found[f"plain_{kind}"].append(self._plain.ask(kind)["tokens_per_s"])
        return found

    def level(self, level: int) -> Row:
        """Cycles of plain vLLM's own sleep."""
        return self.plain.ask("level", level=level, cycles=self.scene.setting.cycles)

    def plain_b(self) -> Row:
        """A fresh vLLM on the second checkpoint."""
        plain = PlainProcess(self.scene.setting.work, self.scene.sources["b"], self.scene.device, self.scene.arguments)
        try:
            return {"start_s": plain.start_s, **self._compared(plain, "b")}
        finally:
            plain.end()

    def _compared(self, plain: PlainProcess, name: str) -> Row:
        ids = plain.ask("tokens")["ids"]
        return {"ids": ids, "same_tokens_as_ours": tuple(ids) == self.tokens.get(name)}

    def end(self) -> None:
        if self._plain is not None:
            self._plain.end()

    def newcomer(self) -> Row:
        """A second engine that reads no weights, on the memory of the first."""
        first = self.engine
        second = self.scene.start_engine("two", bare=True)
        try:
            with self._up("a"):
                second.tell(self._attach("a"))
                second.tell(Detach())  # it starts with memory of its own under its weights, and gives it up here
                before = self._used("bytes")
                up, attach_ms = second.timed(self._attach("a"))
                second.tell(Wake(model="a"))
                ids = second.generate(TOKENS).ids
                after = self._used("bytes")
                added = after["bytes"] - before["bytes"] if after else None
                row = {
                    "start_s": second.ready_s, "attach_ms": attach_ms, "bytes_copied": up.bytes_copied, "bytes_kv": up.bytes_kv,
                    "added_bytes": added, "same_tokens": ids == first.generate(TOKENS).ids == self.tokens["a"],
                }  # fmt: skip
        finally:
            second.end()
        return row

    def artefacts(self) -> Row:
        """Starts of skeletons that read no weights: without what an earlier one has worked out, and with it."""
        place, found = self.scene.setting.work / "artefacts", {}
        for name in ("without", "with"):
            engine = self.scene.start_engine("three", bare=True, artefacts=place)
            engine.end()
            found[name] = engine.ready_s
            print(f"  {name}: {engine.ready_s:.1f} s", file=sys.stderr, flush=True)
        return {"start_s": found, "bytes": sum(file.stat().st_size for file in place.rglob("*") if file.is_file())}

    # ---- within ---------------------------------------------------------------------------------------------

    def _attach(self, name: str) -> Attach:
        return Attach(pool_socket=str(self.scene.socket), weight_set=self.sets[name])

    def _switch(self, name: str) -> float:
        """Milliseconds. Engines without memory of their own under their weights change sets asleep."""
        if self.scene.device:
            return self.engine.timed(self._attach(name))[1]
        return sum(self.engine.timed(order)[1] for order in (Sleep(), Detach(), self._attach(name), Wake(model=name)))

    @contextmanager
    def _up(self, name: str) -> Iterator[EngineProcess]:
        self.engine.tell(self._attach(name))
        self.engine.tell(Wake(model=name))
        yield self.engine
        self.engine.tell(Sleep())
        self.engine.tell(Detach())

    @contextmanager
    def _kept(self, resident: bool) -> Iterator[None]:
        """Both sets stay where they are while their engine lets go of them, if `resident`."""
        kept: list[Attachment] = []
        try:
            for weight_set in self.sets.values() if resident else ():
                kept.append(attach_device(self.scene.socket, weight_set, self.scene.device, lambda attached, fds: None))
            yield
        finally:
            for one in kept:
                one.close()

    def _warm_ms(self) -> float:
        return statistics.median(self.engine.generate(1).first_ms for _ in range(3))

    def _daemon(self) -> Row:
        return held("daemon", self.scene.daemon.pid) if self.scene.daemon is not None else {}

    def _used(self, name: str) -> Row:
        devices = self.scene.device.split(",") if self.scene.device else []
        return {name: sum(map(gpus.used_bytes, devices))} if devices else {}


def _seconds(run: list[Generated]) -> float:
    return max(one.whole_ms for one in run) / 1000
