"""vLLM without a GPU: the same engine core, for trying on any machine what goes to disk and comes back.

No memory can be taken from it there: vLLM packs weights for the processor after loading and has no sleep mode, so the engine
keeps its own weights and its KV memory, and sleeps by not being asked. No plane starts it.
"""

import atexit
import os
from pathlib import Path
from typing import Any, Final

from worker.engines.interface import EngineFault
from worker.engines.messages import Sampling, State, Stocked
from worker.engines.vllm import VllmEngine
from worker.engines.vllm_arguments import ENVIRONMENT, engine_arguments
from worker.engines.vllm_start import kept, settled
from worker.processes import private_bytes

FURTHER: Final = {
    "VLLM_CPU_CI_ENV": "1",  # no warm-up run
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # the permission to use AMX is per process, and not part of an image
}
_GPU_ONLY: Final = ("enable_sleep_mode", "gpu_memory_utilization", "compilation_config")


class CpuVllmEngine(VllmEngine):
    """`source`: a directory with config.json and weights. `artefacts`: as `VllmEngine`'s."""

    def __init__(self, source: Path, arguments: dict[str, Any], *, artefacts: Path | None = None) -> None:
        with kept(artefacts, source, arguments, []) as told:
            self._begin(told, arguments)
        settled(self._config, source)

    def _begin(self, source: Path, arguments: dict[str, Any]) -> None:
        prepare(compiled=bool(arguments.get("compile")))
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
        from vllm.v1.engine.core import EngineCore  # noqa: PLC0415
        from vllm.v1.executor import Executor  # noqa: PLC0415

        told = cpu_arguments(source, arguments)
        self._config = config = EngineArgs(**told).create_engine_config()
        self._core: Any = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._gang, self._awake = None, False
        self._running: dict[str, Sampling] = {}
        self._context: int = config.model_config.max_model_len
        self._vocabulary: int = config.model_config.get_vocab_size()
        self._kv_bytes = int(told["kv_cache_memory_bytes"])
        atexit.register(os._exit, 0)

    def stage(self, pool_socket: str, source: str, form: str) -> Stocked:
        raise _unmappable()

    def attach(self, pool_socket: str, weight_set: str) -> None:
        raise _unmappable()

    def detach(self) -> None:
        if self._awake:
            raise EngineFault("busy", "awake: put it to sleep first")

    def wake(self, model: str) -> None:
        self._awake = True

    def sleep(self) -> None:
        self._forget()
        self._awake = False

    def scrub(self) -> None:
        if self._awake:
            raise EngineFault("busy", "put it to sleep first")
        self._must_rest()
        from worker.engines import vllm_parking  # noqa: PLC0415 - torch, as above

        vllm_parking.scrub(self._core)

    def moved(self, device: str) -> None:
        raise EngineFault("not_available", f"this engine is on no device: it can't be on {device} either")

    def state(self) -> State:
        return State(
            attached=None, awake=self._awake, running=len(self._running), bytes_mapped=0,
            bytes_kv=self._kv_bytes if self._awake else 0, bytes_private=private_bytes(os.getpid()),
        )  # fmt: skip


def prepare(*, compiled: bool = False) -> None:
    """Before vLLM is imported, in each process of it."""
    os.environ.update(ENVIRONMENT | FURTHER)
    if compiled:
        del os.environ["VLLM_CPU_CI_ENV"]  # it compiles during that run
    import torch  # noqa: PLC0415 - the environment counts when it is imported

    torch.cpu._init_amx()  # vLLM's own kernels for small weights use it without asking


def cpu_arguments(source: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments, without those that only a GPU has. `compile`: what its processor platform makes of it."""
    told = engine_arguments(source, arguments | {"enforce_eager": not arguments.get("compile")}, bare=False)
    return {name: value for name, value in told.items() if name not in _GPU_ONLY}


def _unmappable() -> EngineFault:
    return EngineFault("not_available", "vLLM's weights can't be mapped on a processor: this engine has its own")
