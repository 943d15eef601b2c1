"""What a swap is measured with: a directory, a pool daemon of its own, checkpoints, engines."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from compose.bench.engineprocess import EngineProcess
from compose.bench.rows import Row
from compose.bench.shapes import SHAPES, Shape
from compose.refusal import EnvironmentRefusal
from pool.client import PoolClient
from worker import gpus
from worker.engines.messages import Stage

SMALL: Final = "smollm2"
"""The shape that needs no GPU: a real small model in the Transformers engine."""
_CONTEXT: Final = 4096
_READY_S: Final = 60.0


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured. `shape`: a name of `SHAPES`, `smollm2`, or empty: then `source` is the one checkpoint."""

    shape: str
    source: Path | None
    devices: tuple[gpus.Gpu, ...]
    ranks: int = 1
    """GPUs that the model is cut over: the first of `devices`."""
    cycles: int
    work: Path
    alone: bool = False
    """One checkpoint is enough."""
    arguments: dict[str, Any] = {}
    """Of the engine, over those that follow from the shape."""


class Scene:
    """Enter it; everything that it has started ends with it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.engine_name = "vllm" if setting.devices else "transformers"
        self.device = ",".join(one.uuid for one in setting.devices[: setting.ranks])
        self.shape: Shape | None = SHAPES.get(setting.shape)
        self.socket = setting.work / "pool.sock"
        self.daemon: subprocess.Popen[bytes] | None = None
        self.engines: list[EngineProcess] = []
        self.sources: dict[str, Path] = {}
        """Name of a checkpoint (`a`, `b`) -> its directory."""
        self.arguments = self._arguments()

    def _arguments(self) -> dict[str, Any]:
        if not self.setting.devices:
            context = {"max_model_len": 512} if self.setting.shape == SMALL else {}
            return {"max_num_seqs": 1, "dtype": "float32", **context, **self.setting.arguments}
        kv_bytes = self.shape.kv_bytes if self.shape else 8 << 30
        chosen: dict[str, Any] = {"kv_bytes": kv_bytes, "max_num_seqs": 256, "max_model_len": _CONTEXT}
        if self.shape is not None and self.shape.dummy:
            chosen["dummy_weights"] = True
        return {**chosen, **self.setting.arguments}

    def __enter__(self) -> Self:
        directory = self.setting.work / "pool"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for engine in self.engines:
            engine.end()
        if self.daemon is not None:
            self.daemon.send_signal(signal.SIGTERM)
            try:
                self.daemon.wait(60)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait(20)

    # ---- what is measured -----------------------------------------------------------------------------------

    def make(self) -> Row:
        """Checkpoints: two of a shape, made up; the one of a directory as it is. Bytes of each."""
        match self.setting:
            case Setting(source=Path() as source):
                self.sources = {"a": source}
            case Setting(shape=shape) if shape == SMALL:
                from compose.demo import make  # noqa: PLC0415 - only for this shape

                (self.setting.work / "models").mkdir(mode=0o700, exist_ok=True)
                specs = asyncio.run(make(self.setting.work, lambda line: print(line, file=sys.stderr)))
                self.sources = {name: Path(spec.source) for name, spec in zip("ab", specs[:2], strict=True)}
            case Setting(shape=shape):
                self.sources = {name: self.setting.work / f"{shape}-{name}" for name in ("a" if self._one() else "ab")}
                self._write(self.sources, shape, seed=1)
        if self.shape is not None and self.shape.draft:
            self._write({"draft": self.setting.work / "draft"}, self.shape.draft, seed=3)
            self.arguments |= {"draft_model": str(self.setting.work / "draft")}
        return {name: _size(path) for name, path in self.sources.items()}

    def _write(self, places: dict[str, Path], shape: str, seed: int) -> None:
        """Checkpoints of a shape, side by side, each with a seed of its own from `seed` on. Raises EnvironmentRefusal."""
        argv = [sys.executable, "-m", "compose.bench.checkpoints"]
        runs = [subprocess.Popen([*argv, str(path), shape, str(nth)]) for nth, path in enumerate(places.values(), seed)]
        ends = [run.wait() for run in runs]
        if any(ends):
            raise EnvironmentRefusal("no_checkpoint", f"No checkpoint of shape {shape} could be made.", "See above why.")

    def _one(self) -> bool:
        return self.setting.alone or (self.shape is not None and self.shape.dummy)

    def start_pool(self) -> None:
        """Its budget is what all checkpoints need, and half a GiB a set."""
        need = sum(_size(path) for path in self.sources.values())
        if self.shape is not None and self.shape.dummy:
            need = self.shape.bytes
        budget = need + len(self.sources) * (1 << 29)
        argv = [sys.executable, "-m", "pool.daemon", "--socket", str(self.socket)]
        argv += ["--directory", str(self.setting.work / "pool"), "--budget", str(budget), "--forget"]
        environment = dict(os.environ)
        if self.setting.devices:
            argv.append("--gpus")
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(one.uuid for one in self.setting.devices)
        with (self.setting.work / "pool.log").open("wb") as log:
            self.daemon = subprocess.Popen(argv, stderr=log, env=environment)
        ends = time.monotonic() + _READY_S
        while not self._answers():
            if self.daemon.poll() is not None or time.monotonic() > ends:
                said = (self.setting.work / "pool.log").read_text(errors="replace")[-2000:]
                raise EnvironmentRefusal("no_pool", f"The pool daemon did not start: {said}", "See what it says.")
            time.sleep(0.05)

    def _answers(self) -> bool:
        async def ask() -> None:
            async with await PoolClient.connect(self.socket) as client:
                await client.describe()

        try:
            asyncio.run(ask())
        except OSError:
            return False
        return True

    def start_engine(self, name: str, *, bare: bool = False, artefacts: Path | None = None) -> EngineProcess:
        """One more engine of checkpoint `a`'s configuration. artefacts: where it finds and keeps what its start works out."""
        engine = EngineProcess(
            self.setting.work / name, self.engine_name, self.sources["a"], self.device, self.arguments,
            bare=bare, artefacts=artefacts,
        )  # fmt: skip
        self.engines.append(engine)
        return engine

    def stage(self, engine: EngineProcess, name: str) -> tuple[str, Row]:
        """Weight set and figures of bringing a checkpoint into the pool."""
        source, begun = self.sources[name], time.monotonic()
        if self.engine_name == "vllm":
            stocked = engine.tell(Stage(pool_socket=str(self.socket), source=str(source), form=self.form()))
        else:
            stocked = asyncio.run(self._stage_files(source))
        took_ms = (time.monotonic() - begun) * 1000
        row = {"ms": took_ms, "bytes": stocked.size_bytes, "read_bytes": stocked.read_bytes}
        return stocked.weight_set, row

    def form(self) -> str:
        """The name that engines of this setting have for the layout they make."""
        return "bench-" + json.dumps(self.arguments, sort_keys=True)

    async def _stage_files(self, source: Path) -> Any:
        async with await PoolClient.connect(self.socket) as client:
            return await client.stage(source)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
