"""The vLLM engine: its engine core alone, ids in and out, in one process; weights in the pool, mapped while it is awake."""

import atexit
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pool.messages import Filled
from worker.engines.interface import IDLE, EngineFault, Output, Stepped
from worker.engines.messages import Sampling, State, Stocked
from worker.engines.vllm_arguments import ENVIRONMENT, engine_arguments, sampling_parameters
from worker.engines.vllm_faults import faults
from worker.engines.vllm_place import alone, gang, ordinals, used_bytes
from worker.engines.vllm_start import configured, kept

if TYPE_CHECKING:
    from pool.vllm_backend import PoolBackend
    from worker.engines.vllm_gang import Gang

CHECK: Final = "check"
"""Name of the request of a known-answer check; callers' names are longer."""


class VllmEngine:
    """`source`: a directory with config.json and, unless `bare`, the weights of the first model. `device`: a GPU's UUID, or
    several, in order of rank and with commas between them: a gang, tensor parallel over all of them.

    Starts asleep: KV memory is given back at once, weights stay in vLLM's own memory until they are staged or others attached.
    `artefacts`: where what this start compiles is kept for the next; None: where vLLM would.
    """

    def __init__(
        self, source: Path, arguments: dict[str, Any], *, device: str, bare: bool = False, artefacts: Path | None = None
    ) -> None:
        with kept(artefacts, source, arguments, device.split(",")):
            self._start(source, arguments, device, bare)

    def _start(self, source: Path, arguments: dict[str, Any], device: str, bare: bool) -> None:
        self._device = device
        self._source = "" if bare else str(source)
        """Whose weights lie in vLLM's own memory."""
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
        self._must_rest()
        self._core.reset_prefix_cache()
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
            except OSError:
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
        self._awake = True

    def sleep(self) -> None:
        self._must_rest()
        self._core.reset_prefix_cache()
        self._backend.kv.release()
        self._awake = False

    def _must_rest(self) -> None:
        if self._running:
            raise EngineFault("busy", f"{len(self._running)} requests run: drain first")
        while self._works():
            self._core.step_fn()  # the last finished requests are taken off the books by one more step

    # ---- requests -------------------------------------------------------------------------------------------

    def submit(self, request: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        from vllm.v1.engine import EngineCoreRequest  # noqa: PLC0415

        if not self._awake:
            raise EngineFault("not_awake", "asleep")
        if len(prompt) >= self._context:
            raise EngineFault("too_long", f"a prompt of {len(prompt)} tokens in a context of {self._context}")
        if not prompt or min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise EngineFault("failed", f"a prompt must hold ids from 0 to {self._vocabulary - 1}")
        asked = EngineCoreRequest(
            request_id=request, prompt_token_ids=list(prompt), mm_features=None, sampling_params=sampling_parameters(sampling),
            pooling_params=None, arrival_time=time.time(), lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        self._core.add_request(*self._core.preprocess_add_request(asked))
        self._running[request] = sampling

    def abort(self, request: str) -> bool:
        if self._running.pop(request, None) is None:
            return False
        self._core.abort_requests([request])
        return True

    def check(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        if self._running:
            raise EngineFault("busy", f"{len(self._running)} requests run: a check would wait for them")
        self.submit(CHECK, prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
        ids: tuple[int, ...] = ()
        while CHECK in self._running:
            for output in self.step().outputs:
                ids += output.ids
        return ids

    def step(self) -> Stepped:
        if not self._works():
            return IDLE
        try:
            produced, executed = self._core.step_fn()
            self._core.post_step(executed)
        except Exception as error:
            raise EngineFault("failed", f"a step failed: {error!r}", fatal=True) from error
        outputs = [  # hundreds of times a second for hundreds of requests: the usual case is decided here
            Output(one.request_id, tuple(one.new_token_ids)) if one.finish_reason is None else self._last(one)
            for batch in (produced or {}).values()
            for one in batch.outputs
            if one.request_id in self._running
        ]
        return Stepped(tuple(outputs), 0.0 if self._works() else None)

    def _last(self, one: Any) -> Output:
        sampling, ids = self._running.pop(one.request_id), tuple(one.new_token_ids)
        match str(one.finish_reason):
            case "stop":
                ended = bool(ids) and ids[-1] in sampling.stop_ids
                return Output(one.request_id, ids[:-1] if ended else ids, "stop")
            case "length":
                return Output(one.request_id, ids, "length")
            case reason:
                return Output(one.request_id, ids, "failed", f"vLLM ended it: {reason}")

    def scrub(self) -> None:
        if self._gang is not None:
            raise EngineFault("not_available", "a gang's ranks can't be written to disk in this version")
        if self._awake or self._backend.weights.attached is not None or self._backend.weights.own:
            raise EngineFault("busy", "weights or KV memory are there still: sleep and detach first")
        self._must_rest()
        self._backend.trim()
        from worker.engines import vllm_parking  # noqa: PLC0415 - torch, as above

        self._parked = True
        vllm_parking.scrub(self._core)

    def revived(self) -> None:
        from worker.engines import vllm_parking  # noqa: PLC0415

        vllm_parking.revived()
        self._parked = False

    def moved(self, device: str) -> None:
        if self._gang is not None:
            raise EngineFault("not_available", "a gang's ranks can't change their devices")
        if self._awake or self._backend.weights.attached is not None or self._backend.weights.own:
            raise EngineFault("busy", "weights or KV memory are there still: sleep and detach first")
        self._backend.moved(device)
        self._device = device

    def running(self) -> int:
        return len(self._running)

    def _works(self) -> bool:
        """Asynchronous scheduling holds a batch back: the queue counts, too."""
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def state(self) -> State:
        weights = self._backend.weights
        used = None if self._parked else used_bytes(self._device, self._gang)  # a question would open the driver's files again
        return State(
            attached=weights.attached, awake=self._awake, running=len(self._running), bytes_mapped=weights.bytes_mapped,
            bytes_kv=self._backend.kv.size_bytes, bytes_own=weights.shared_bytes if weights.own else 0,
            bytes_private=used or 0, bytes_device=used,
            bytes_copied=self._filled.copied_bytes, copy_ms=self._filled.took_ms,
            copy_links={shard.via: shard.copied_bytes for shard in self._filled.shards},
        )  # fmt: skip
