"""The reference engine: Hugging Face Transformers, parameters over the pool's memory, batching of our own."""

import ctypes
import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pool.messages import Tensor
from worker.engines.batch import Batch, Sequence
from worker.engines.interface import IDLE, EngineFault, Stepped, staged_from_files
from worker.engines.kv import SlotCache, kv_shape
from worker.engines.messages import Sampling, State, Stocked
from worker.engines.skeleton import DTYPES, Skeleton
from worker.engines.weights import Weights
from worker.processes import private_bytes

CHECK: Final = "check"
"""Name of the sequence of a known-answer check; requests' names are longer."""


class TransformersEngine:
    """`source`: a directory whose config.json says what the skeleton is; no weights are read from it.

    One processor is left to the others unless `threads` says otherwise: decoding waits for memory, not for processors (on two
    of them one thread gave 25 tokens/s and two gave 24; with both taken by others two gave 10).
    """

    def __init__(self, source: Path, arguments: dict[str, Any]) -> None:
        torch.set_num_threads(int(arguments.get("threads", max(1, len(os.sched_getaffinity(0)) - 1))))
        dtype = torch.bfloat16 if arguments.get("dtype") == "bfloat16" else torch.float32
        self._skeleton = Skeleton(source, dtype)
        self._cache = SlotCache(kv_shape(self._skeleton.config, arguments, dtype.itemsize), dtype)
        self._batch: Batch | None = None
        self._weights = Weights()
        self._views: tuple[object, list[nn.Parameter]] = (None, [])
        """What was bound last, and the place and layout that it was made for."""

    def attach(self, pool_socket: str, weight_set: str) -> None:
        mapped = self._weights.mapped
        if mapped is not None and mapped.weight_set == weight_set:
            return
        if mapped is not None:
            raise EngineFault("busy", f"{mapped.weight_set} is mapped: detach it first")
        attachment = self._weights.reference(pool_socket, weight_set)
        try:
            chosen = self._skeleton.chosen(attachment.attached.tensors)
        except EngineFault:
            attachment.close()
            raise
        self._weights.map(attachment)
        layout = (self._weights.place(), attachment.attached.segments, [(one.segment, one.offset) for one in chosen])
        if self._views[0] != layout:
            self._views = (layout, [self._parameter(tensor) for tensor in chosen])
        self._skeleton.bind(self._views[1])

    def detach(self) -> None:
        if self._batch is not None:
            raise EngineFault("busy", "awake: put it to sleep first")
        self._skeleton.unbind()
        self._weights.unmap()

    def wake(self, model: str) -> None:
        if self._weights.mapped is None:
            raise EngineFault("not_attached", f"no weight set is mapped for {model}")
        if self._batch is None:
            self._batch = Batch(self._skeleton.forward, self._cache)

    def sleep(self) -> None:
        if self._batch:
            raise EngineFault("busy", f"{len(self._batch)} requests run: drain first")
        self._batch = None
        self._cache.clear()
        ctypes.CDLL(None).malloc_trim(0)  # activations of long prompts would stay in malloc's hands

    def submit(self, request: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        batch = self._awake()
        context = self._cache.shape.context_tokens
        if len(prompt) >= context:
            raise EngineFault("too_long", f"a prompt of {len(prompt)} tokens in a context of {context}")
        vocabulary = self._skeleton.config.get_text_config().vocab_size
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            raise EngineFault("failed", f"a prompt must hold ids from 0 to {vocabulary - 1}")
        batch.add(Sequence(request, prompt, sampling))

    def abort(self, request: str) -> bool:
        return self._batch is not None and self._batch.remove(request)

    def check(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        batch = self._awake()
        if len(batch):
            raise EngineFault("busy", f"{len(batch)} requests run: a check would wait for them")
        self.submit(CHECK, prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
        ids: tuple[int, ...] = ()
        while len(batch):
            for output in batch.step():
                ids += output.ids
        return ids

    def step(self) -> Stepped:
        batch = self._batch
        if not batch:
            return IDLE
        try:
            outputs = tuple(batch.step())
        except RuntimeError as error:  # torch's own: out of memory, a shape that a model's code can't take
            raise EngineFault("failed", f"a step failed: {error}", fatal=True) from error
        return Stepped(outputs, 0.0 if len(batch) else None)

    def stage(self, pool_socket: str, source: str, form: str) -> Stocked:
        raise staged_from_files()

    def scrub(self) -> None:
        if self._batch is not None or self._weights.mapped is not None:
            raise EngineFault("busy", "put it to sleep and detach it first")
        self._cache.clear()

    def revived(self) -> None:
        torch.cpu._init_amx()  # the permission to use AMX is the kernel's, per process, and not part of an image

    def moved(self, device: str) -> None:
        """A share of host memory is one as good as another."""

    def running(self) -> int:
        return len(self._batch) if self._batch is not None else 0

    def state(self) -> State:
        mapped = self._weights.mapped
        awake = self._batch is not None
        return State(
            attached=mapped.weight_set if mapped is not None else None, awake=awake, running=self.running(),
            bytes_mapped=self._weights.bytes_mapped, bytes_kv=self._cache.shape.size_bytes if awake else 0,
            bytes_private=private_bytes(os.getpid()),
        )  # fmt: skip

    def _awake(self) -> Batch:
        if self._batch is None:
            raise EngineFault("not_awake", "asleep")
        return self._batch

    def _parameter(self, tensor: Tensor) -> nn.Parameter:
        """A parameter over the pool's memory. Torch knows no read-only tensors: the mapping is what forbids to write."""
        flat = torch.from_numpy(self._weights.view(tensor))
        return nn.Parameter(flat.view(DTYPES[tensor.dtype]).view(tensor.shape), requires_grad=False)
