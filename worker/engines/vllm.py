"""The vLLM engine: its engine core alone, ids in and out, in one process; weights in the pool, mapped while it is awake."""

import atexit
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pool.messages import Filled
from worker.engines.interface import EngineFault
from worker.engines.messages import Sampling, State, Stocked
from worker.engines.vllm_arguments import ENVIRONMENT, engine_arguments
from worker.engines.vllm_faults import faults
from worker.engines.vllm_place import alone, gang, ordinals, used_bytes
from worker.engines.vllm_requests import Requests
from worker.engines.vllm_start import configured, kept, settled

if TYPE_CHECKING:
    from pool.vllm_backend import PoolBackend
    from worker.engines.vllm_gang import Gang


class VllmEngine(Requests):
    """`source`: a directory with config.json and, unless `bare`, the weights of the first model. `device`: a GPU's UUID, or
    several, in order of rank and with commas between them: a gang, tensor parallel over all of them.

    Starts asleep: KV memory is given back at once, weights stay in vLLM's own memory until they are staged or others attached.
    `artefacts`: where what this start compiles is kept for the next; None: where vLLM would.
    """

    _stack_bytes = 0
    """Of the GPU's stacks, a thread: what they were at before this engine was parked."""

    def __init__(
        self, source: Path, arguments: dict[str, Any], *, device: str, bare: bool = False, artefacts: Path | None = None
    ) -> None:
        self._source = "" if bare else str(source)
        """Whose weights lie in vLLM's own memory."""
        with kept(artefacts, source, arguments, device.split(",")) as told:
            self._start(told, arguments, device, bare)
        settled(self._config, source)

    def _start(self, source: Path, arguments: dict[str, Any], device: str, bare: bool) -> None:
        self._device = device
        devices = tuple(device.split(","))
        os.environ.update(ENVIRONMENT)
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ["CUDA_VISIBLE_DEVICES"] = ordinals(devices)
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - the environment counts when these are imported
        from vllm.v1.engine.core import EngineCore  # noqa: PLC0415
        from vllm.v1.executor import Executor  # noqa: PLC0415

        from pool import vllm_backend  # noqa: PLC0415

        vllm_backend.register()
        config = configured(EngineArgs, engine_arguments(source, arguments, bare=bare, ranks=len(devices)))
        self._config = config
        self._core: Any = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._gang = gang(self._core, devices) if len(devices) > 1 else None
        self._backend: PoolBackend | Gang = self._gang or alone(self._core, device)
        self._graphs = self._backend.graphs
        self._awake = self._parked = False
        self._running: dict[str, Sampling] = {}
        self._filled = Filled(copied_bytes=0, took_ms=0.0, bytes_per_s=0.0, path="resident")
        self._context: int = config.model_config.max_model_len
        self._vocabulary: int = config.model_config.get_vocab_size()
        # vLLM's own way out takes seconds and releases memory that it does not own any more; the kernel does both at once.
        atexit.register(os._exit, 0)
        if self._gang is not None:
            atexit.register(self._gang.end)  # the last registered goes first

    # ---- weights --------------------------------------------------------------------------------------------

    def stage(self, pool_socket: str, source: str, form: str) -> Stocked:
        begun = time.monotonic()
        if self._backend.weights.attached is not None:
            raise EngineFault("busy", f"{self._backend.weights.attached} is mapped: sleep and detach first")
        with faults(pool_socket, self._device):
            if (known := self._backend.find(pool_socket, source, form)) is not None:
                return Stocked(weight_set=known, size_bytes=self._backend.weights.shared_bytes, read_bytes=0)
            if self._source != source:
                self._load(source)
            staged = self._backend.weights.deposit(pool_socket, source, form)
        took_ms = (time.monotonic() - begun) * 1000
        return Stocked(
            weight_set=staged.weight_set, size_bytes=staged.size_bytes, read_bytes=staged.read_bytes, took_ms=took_ms
        )

    def _load(self, source: str) -> None:
        if not self._backend.weights.own:
            self._backend.weights.take_own()
        self._source = ""
        self._core.collective_rpc("reload_weights", kwargs={"weights_path": source})
        self._backend.load_draft()
        self._backend.trim()  # what loading has used is of no use to anybody: 1.2 GiB at 8B
        self._source = source

    def attach(self, pool_socket: str, weight_set: str) -> None:
        weights = self._backend.weights
        if weights.attached == weight_set:
            return
        if weights.attached is not None:
            if not self._awake:
                raise EngineFault("busy", f"{weights.attached} is mapped: detach it first")
            self._switch(pool_socket, weight_set)
            return
        self._map(pool_socket, weight_set)

    def _map(self, pool_socket: str, weight_set: str) -> None:
        self._drop_own()
        with faults(pool_socket, self._device):
            try:
                self._filled = self._backend.attach(weight_set, pool_socket=pool_socket)
            except EngineFault:  # of ranks that don't answer: they are not asked again
                raise
            except BaseException:
                self._backend.kv.release()
                raise

    def _drop_own(self) -> None:
        if self._backend.weights.own:
            self._backend.weights.drop_own()
            self._source = ""

    def detach(self) -> None:
        """KV memory goes, too, if it was made for a wake that did not come, and weights of its own that nobody attached."""
        if self._awake:
            raise EngineFault("busy", "awake: put it to sleep first")
        self._backend.kv.release()
        self._drop_own()
        self._backend.weights.detach()

    def _switch(self, pool_socket: str, weight_set: str) -> None:
        """Another set while awake and drained: KV memory stays, what it remembers is forgotten. A failure leaves it asleep."""
        self._forget()
        if self._exchanged(pool_socket, weight_set):
            return
        self._backend.weights.detach()
        self._awake = False
        self._map(pool_socket, weight_set)
        self._awake = True

    def _exchanged(self, pool_socket: str, weight_set: str) -> bool:
        """In place, where nobody else has the memory: nothing is unmapped, made or mapped."""
        with faults(pool_socket, self._device):
            try:
                filled = self._backend.exchange(weight_set)
            except BaseException:
                self._awake = False
                self._backend.kv.release()
                raise
        if filled is not None:
            self._filled = filled
        return filled is not None

    # ---- awake and asleep -----------------------------------------------------------------------------------

    def wake(self, model: str) -> None:
        if self._backend.weights.attached is None:
            raise EngineFault("not_attached", f"no weight set is mapped for {model}")
        try:
            self._backend.kv.create()
        except RuntimeError as error:
            self._backend.kv.release()
            raise EngineFault("no_memory", f"KV memory: {error}") from error
        if self._gang is not None:
            self._gang.capture_graphs()
        self._awake = True

    def sleep(self) -> None:
        self._forget()
        self._backend.kv.release()
        self._awake = False

    def _forget(self) -> None:
        """Empty the prefix cache while its memory is still there. vLLM only warns when it can't, and would then answer from
        memory of other contents.
        """
        self._must_rest()
        if self._core.reset_prefix_cache() is False:
            raise EngineFault("cache_kept", "vLLM did not forget its prefix cache: blocks of KV memory are still in use")

    def scrub(self) -> None:
        """A gang can be taken off its GPUs, and not be written to disk: its ranks are told as one, their files are theirs."""
        if self._awake or self._backend.weights.attached is not None or self._backend.weights.own:
            raise EngineFault("busy", "weights or KV memory are there still: sleep and detach first")
        self._must_rest()
        self._backend.trim()
        from worker.engines import vllm_parking  # noqa: PLC0415 - torch, as above

        if self._gang is not None:
            self._gang.checkpoint_prepare(vllm_parking.PARKED_STACK_BYTES)
        else:
            self._stack_bytes = vllm_parking.scrub(self._core)
        self._parked = True

    def revived(self) -> None:
        from worker.engines import vllm_parking  # noqa: PLC0415

        if self._gang is not None:
            self._gang.checkpoint_restore()
        else:
            vllm_parking.revived(self._stack_bytes)
        self._parked = False

    def moved(self, device: str) -> None:
        if self._gang is not None:
            raise EngineFault("not_available", "a gang's ranks can't change their devices")
        if self._awake or self._backend.weights.attached is not None or self._backend.weights.own:
            raise EngineFault("busy", "weights or KV memory are there still: sleep and detach first")
        self._backend.moved(device)
        self._device = device

    def state(self) -> State:
        weights = self._backend.weights
        used = None if self._parked else used_bytes(self._device, self._gang)  # a question would open the driver's files again
        return State(
            attached=weights.attached, awake=self._awake, running=len(self._running), bytes_mapped=weights.bytes_mapped,
            bytes_kv=self._backend.kv.size_bytes, bytes_own=weights.shared_bytes if weights.own else 0,
            bytes_private=used or 0, bytes_device=used,
            bytes_copied=self._filled.copied_bytes, copy_ms=self._filled.took_ms,
            copy_links={shard.via: shard.copied_bytes for shard in self._filled.shards},
            graphs=self._graphs, graphs_again=self._backend.graphs - self._graphs,
        )  # fmt: skip
