"""vLLM's sleep-mode backend over the pool, and how vLLM comes to know of it (entry point `vllm.general_plugins`).

vLLM decides when its memory goes and comes; here is how: weights belong to the pool and are only mapped, KV memory is released
and made again, everything else (scratch, graphs, workspaces) stays. With vLLM 0.26 the backend is chosen by
`ModelConfig.sleep_mode_backend`, later by `--sleep-mode-backend enginehouse`.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch
from vllm.device_allocator.cumem import CuMemAllocator, create_and_map, unmap_and_release
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

from pool import vllm_graphs, vllm_version
from pool.devicelink import find
from pool.messages import Filled
from pool.vllm_weights import VllmWeights

NAME = "enginehouse"
_KV = "kv_cache"


def register() -> None:
    """Run by vLLM in each of its processes, possibly twice."""
    vllm_graphs.count()
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(NAME, "pool.vllm_backend", "PoolBackend")


class NotBound(RuntimeError):
    """vLLM was told to sleep before anybody said where the pool is: see `PoolBackend.bind`."""


class Kv:
    """vLLM's KV memory: physical memory goes and comes, addresses stay, contents are lost."""

    def __init__(self, woken: Callable[[], None]) -> None:
        self._data = [one for one in CuMemAllocator.get_instance().pointer_to_data.values() if one.tag == _KV]
        self._woken = woken
        self.there = True

    @property
    def size_bytes(self) -> int:
        return sum(data.handle[1] for data in self._data) if self.there else 0

    def release(self) -> None:
        """Twice is fine."""
        if not self.there:
            return
        torch.cuda.synchronize()
        for data in self._data:
            if not data.is_asleep:
                unmap_and_release(data.handle)
                data.is_asleep = True
        self.there = False

    def create(self) -> None:
        """Twice is fine. Raises RuntimeError for want of memory; what was made stays for the next `release`."""
        if self.there:
            return
        self.there = True
        for data in self._data:
            if data.is_asleep:
                create_and_map(data.handle)
                data.is_asleep = False
        self._woken()


class PoolBackend(SleepModeBackend):  # type: ignore[misc]
    """`bind` it once the model is loaded and KV memory exists; before that a sleep is refused."""

    def __init__(self) -> None:
        super().__init__()
        self._weights: VllmWeights | None = None
        self._kv: Kv | None = None
        self._where = ("", "")
        self._beside: tuple[str, ...] = ()
        self._last: str | None = None
        self._worker: Any = None

    def bind(self, worker: Any, pool_socket: str, device: str, *, beside: tuple[str, ...] = ()) -> None:
        """worker: vLLM's. device: the UUID of its GPU. beside: those of the other ranks, which attach when this one does."""
        self._worker = worker
        self._weights = VllmWeights(*vllm_version.models(worker), device=device)
        self._kv = Kv(vllm_version.when_kv_is_back(worker))
        vllm_version.make_loadable(worker)
        self._where, self._beside = (pool_socket, device), beside

    def moved(self, device: str) -> None:
        """The process is on another GPU now: from here on its weights go there."""
        self._where = (self._where[0], device)
        self.weights.device = device

    @property
    def weights(self) -> VllmWeights:
        if self._weights is None:
            raise NotBound("bind the backend to its worker, the pool's socket and the device first")
        return self._weights

    @property
    def kv(self) -> Kv:
        if self._kv is None:
            raise NotBound("bind the backend to its worker, the pool's socket and the device first")
        return self._kv

    def find(self, pool_socket: str, source: str, form: str) -> str | None:
        """The set of these files in this form, if the pool has it. Raises PoolRefused, OSError."""
        return find(pool_socket, source, form)

    @property
    def graphs(self) -> int:
        """CUDA graphs that this process has captured."""
        return vllm_graphs.captured()

    def trim(self) -> None:
        """Give back what torch keeps for later."""
        gc.collect()
        torch.cuda.empty_cache()
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # pinned buffers of a bringing: 150 MB that an image would hold

    def attach(self, weight_set: str, *, pool_socket: str | None = None) -> Filled:
        """Weights and KV memory: KV is made while the weights travel."""
        socket, device = self._where
        filled = self.weights.attach(pool_socket or socket, weight_set, device, self.kv.create, beside=self._beside)
        self._last = weight_set
        return filled

    def load_draft(self) -> None:
        """After vLLM has loaded the model's weights: those of the one that drafts for it, if there is one."""
        vllm_version.load_draft(self._worker)

    def exchange(self, weight_set: str) -> Filled | None:
        """See `VllmWeights.exchange`; KV memory stays."""
        filled = self.weights.exchange(weight_set)
        if filled is not None:
            self._last = weight_set
        return filled

    def suspend(self, level: int = 1) -> None:
        """vLLM's own call. Whatever the level, nothing is copied: the pool has the weights (see `VllmWeights.deposit`)."""
        if self.weights.own:
            raise NotBound("deposit the weights into the pool before the first sleep")
        self._state = "SUSPENDED"
        self.kv.release()
        self.weights.detach()

    def resume(self, tags: list[str] | None = None) -> None:
        """vLLM's own call: the set that was there last."""
        self._state = "RESUMING"
        if tags is None or "weights" in tags:
            if self._last is None:
                raise NotBound("no weight set was ever attached")
            self.weights.attach(self._where[0], self._last, self._where[1], lambda: None, beside=self._beside)
        if tags is None or _KV in tags:
            self.kv.create()
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """vLLM's own call since 0.28: KV memory alone can go by itself. Raises NotBound, ValueError."""
        if others := sorted(set(tags) - {_KV}):
            raise ValueError(f"{', '.join(others)} can't be discarded: only {_KV} can, weights are the pool's")
        self.kv.release()
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True
