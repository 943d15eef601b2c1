"""One rank of a tensor parallel vLLM: what the engine's process asks of each of them, and how they answer.

vLLM mixes `Rank` into its worker (`worker_extension_cls`), so `collective_rpc("enginehouse", args=(order, ...))` runs in every
rank at once. An answer is always given and never raised: vLLM stops reading at the first rank that fails, and would take the
others' answers for those of the next question.
"""

import ctypes
import os
import signal
from typing import Any

from pool import vllm_backend, vllm_checkpoint, vllm_graphs, vllm_version
from pool.devicelink import find
from pool.ranks import JOINT, Answer, Word, form_of

vllm_backend.register()
"""A rank imports this module before it loads its model; entry points need an installed distribution."""

_PR_SET_PDEATHSIG = 1


class Rank:
    """Mixed into vLLM's worker: `self` is the worker."""

    def enginehouse(self, order: str, *arguments: Any) -> Answer:
        found, fault, word = None, None, None
        try:
            orders = _Orders(self)
            found = getattr(orders, order)(*arguments)
            word = orders.word()
        except Exception as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            kind = next((name for name in _KINDS if name in names), "RuntimeError")
            fault = (kind, str(getattr(error, "code", "")), str(getattr(error, "message", error)) or repr(error))
        return Answer(found, fault, word)


_KINDS = ("PoolRefused", "LayoutDiffers", "ConnectionError", "TimeoutError", "FileNotFoundError", "OSError")


class _Orders:
    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._rank: int = worker.rank
        self._size: int = worker.vllm_config.parallel_config.world_size
        self._backend: vllm_backend.PoolBackend = vllm_version.sleep_backend(worker)

    def word(self) -> Word:
        weights = self._backend.weights
        return Word(
            os.getpid(), weights.own, weights.attached, weights.shared_bytes, weights.bytes_mapped, self._backend.kv.size_bytes,
            vllm_graphs.captured(),
        )  # fmt: skip

    def bind(self, devices: tuple[str, ...]) -> None:
        """The first order. From here on this rank dies with the engine's process, and with it whatever that holds."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        others = tuple(device for rank, device in enumerate(devices) if rank != self._rank)
        self._backend.bind(self._worker, "", devices[self._rank], beside=others)
        self._backend.kv.release()

    def look(self) -> None:
        """Nothing but the word."""

    def find(self, pool_socket: str, source: str, form: str) -> str | None:
        return find(pool_socket, source, form_of(form, self._rank, self._size))

    def take_own(self) -> None:
        self._backend.weights.take_own()

    def drop_own(self) -> None:
        self._backend.weights.drop_own()

    def trim(self) -> None:
        self._backend.trim()

    def deposit(self, pool_socket: str, source: str, form: str) -> tuple[str, int, int]:
        staged = self._backend.weights.deposit(pool_socket, source, form_of(form, self._rank, self._size))
        return staged.weight_set, staged.size_bytes, staged.read_bytes

    def attach(self, pool_socket: str, weight_sets: str) -> tuple[int, float]:
        """The rank's own of the joint name: weights and KV memory. Failed, nothing is mapped."""
        filled = self._backend.attach(weight_sets.split(JOINT)[self._rank], pool_socket=pool_socket)
        return filled.copied_bytes, filled.took_ms

    def detach(self) -> None:
        self._backend.kv.release()
        self._backend.weights.detach()

    def kv_create(self) -> None:
        self._backend.kv.create()

    def kv_release(self) -> None:
        self._backend.kv.release()

    def checkpoint_hindrance(self) -> str | None:
        return vllm_checkpoint.hindrance()

    def release_graphs(self) -> tuple[int, int]:
        return vllm_checkpoint.release_graphs(self._worker.model_runner)

    def checkpoint_prepare(self, stack_bytes: int) -> int:
        return vllm_checkpoint.prepare(self._worker, stack_bytes)

    def checkpoint_restore(self, stack_bytes: tuple[int, ...]) -> None:
        """By rank, what `checkpoint_prepare` has found."""
        vllm_checkpoint.restore(self._worker, stack_bytes[self._rank])

    def capture_graphs(self) -> None:
        vllm_checkpoint.capture_graphs(self._worker.model_runner)
