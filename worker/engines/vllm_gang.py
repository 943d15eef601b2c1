"""The ranks of a tensor parallel vLLM as one: what every rank does is one operation, with a deadline and a way back.

Has the face of the backend of a vLLM on one GPU (`pool.vllm_backend.PoolBackend`), so that the engine asks either alike.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, Final

from controlplane.rungs import NOT_CHECKPOINTABLE
from pool.client import PoolRefused
from pool.messages import Filled, Refusal, Staged
from pool.native import LayoutDiffers
from pool.ranks import JOINT, Answer, Word
from worker.engines.interface import EngineFault

ORDER_S: Final = 90.0
"""Longer than the pool's own deadline for a set on its way to a device (60 s), and than the worker's for what ranks do among
themselves (communicators, graphs): a rank that is silent beyond it hangs."""
DEPOSIT_S: Final = 900.0
"""16 GiB take 12-15 s into fresh shared memory; large sets come at that rate, beside each other."""
_ERRORS: Final[dict[str, Callable[[str, str], Exception]]] = {
    "PoolRefused": lambda code, message: PoolRefused(Refusal(code=code, message=message)),
    "LayoutDiffers": lambda _, message: LayoutDiffers(message),
    "ConnectionError": lambda _, message: ConnectionError(message),
    "TimeoutError": lambda _, message: TimeoutError(message),
    "FileNotFoundError": lambda _, message: FileNotFoundError(message),
    "OSError": lambda _, message: OSError(message),
}


class Gang:
    """`core`: vLLM's engine core, its ranks started. `devices`: their GPUs' UUIDs, in order of rank.

    A rank that dies takes this process with it, at once: the others wait for it inside kernels that never end.
    """

    def __init__(self, core: Any, devices: tuple[str, ...]) -> None:
        self._core, self._devices = core, devices
        self._words: tuple[Word, ...] = ()
        self._stacks: tuple[int, ...] = ()
        self._without_graphs = False
        self.weights, self.kv = _Weights(self), _Kv(self)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        self.order("bind", devices)

    @property
    def graphs(self) -> int:
        """CUDA graphs that all ranks together have captured."""
        return sum(word.graphs for word in self._words)

    @property
    def words(self) -> tuple[Word, ...]:
        return self._words

    def order(self, order: str, *arguments: Any, deadline_s: float = ORDER_S) -> list[Any]:
        """Have every rank do it; what each found. Raises the first failure once all have answered, naming the rank.

        A rank that does not answer in time leaves the others out of step for good: that fault is fatal.
        """
        answers = self._ask(order, *arguments, deadline_s=deadline_s)
        for rank, answer in enumerate(answers):
            if answer.fault is not None:
                kind, code, message = answer.fault
                text = f"rank {rank} of {len(answers)}: {message}"
                raise _ERRORS[kind](code, text) if kind in _ERRORS else RuntimeError(text)
        return [answer.found for answer in answers]

    def _ask(self, order: str, *arguments: Any, deadline_s: float = ORDER_S) -> list[Answer]:
        try:
            answers: list[Answer] = self._core.collective_rpc("enginehouse", timeout=deadline_s, args=(order, *arguments))
        except Exception as error:
            raise EngineFault("rank_silent", f"{order} by {len(self._devices)} ranks: {error}", fatal=True) from error
        if all(answer.word is not None for answer in answers):
            self._words = tuple(answer.word for answer in answers if answer.word is not None)
        return answers

    def find(self, pool_socket: str, source: str, form: str) -> str | None:
        """The joint name, if the pool has every rank's part."""
        found = self.order("find", pool_socket, source, form)
        return JOINT.join(found) if all(found) else None

    def attach(self, weight_set: str, *, pool_socket: str) -> Filled:
        """All ranks at the same time. If one fails, the others go back to sleep before its failure is told."""
        try:
            found = self.order("attach", pool_socket, weight_set)
        except EngineFault:
            raise
        except Exception:
            self._ask("detach")
            raise
        copied, took_ms = sum(copied for copied, _ in found), max(took for _, took in found)
        return Filled(
            copied_bytes=copied, took_ms=took_ms, bytes_per_s=copied / (took_ms / 1000) if took_ms else 0.0,
            path="host" if copied else "resident",
        )  # fmt: skip

    def exchange(self, weight_set: str) -> Filled | None:
        """Ranks detach and attach: one that failed in place would leave the others with another model."""
        return None

    def moved(self, device: str) -> None:
        raise EngineFault("not_available", "a gang's ranks can't change their devices")

    def checkpoint_prepare(self, stack_bytes: int) -> None:
        """Before a checkpoint of CUDA: what the ranks share is given up, and the graphs that hold it; asleep, nothing mapped.

        Raises EngineFault (`not_checkpointable`: they share more than they give up, and sleep on), or what NCCL does.
        """
        _must_go(self.order("checkpoint_hindrance"))
        found = self.order("release_graphs")
        self._without_graphs = self._without_graphs or any(before for before, _ in found)
        _must_go([f"{left} CUDA graphs are held still" if left else None for _, left in found])
        self._stacks = tuple(self.order("checkpoint_prepare", stack_bytes))

    def checkpoint_restore(self) -> None:
        """Behind the restore. Graphs wait for the next wake: see `capture_graphs`. A failure is the end of the gang."""
        self.order("checkpoint_restore", self._stacks)

    def capture_graphs(self) -> None:
        """With weights and KV memory mapped: those that a checkpoint has cost, if it has.

        Raises EngineFault (fatal): one rank may have them, and another not.
        """
        if not self._without_graphs:
            return
        try:
            self.order("capture_graphs")
        except (RuntimeError, OSError) as error:
            raise EngineFault("graphs_lost", f"CUDA graphs could not be captured again: {error}", fatal=True) from error
        self._without_graphs = False

    def load_draft(self) -> None:
        """A gang has none: its arguments refuse one."""

    def trim(self) -> None:
        self.order("trim")

    def end(self) -> None:
        """Kill the ranks: their own way out would release memory that is not theirs."""
        for worker in getattr(self._core.model_executor, "workers", None) or ():
            worker.proc.kill()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(word.pid for word in self._words)

    def _watch(self) -> None:
        workers = list(self._core.model_executor.workers)
        died = wait([worker.proc.sentinel for worker in workers])
        rank = next((n for n, worker in enumerate(workers) if worker.proc.sentinel in died), -1)
        print(f"rank {rank} of {len(workers)} died: the gang ends", file=sys.stderr, flush=True)  # noqa: T201
        self.end()
        os._exit(70)


def _must_go(hindrances: Sequence[str | None]) -> None:
    """By rank. Raises EngineFault of the first."""
    for rank, why in enumerate(hindrances):
        if why is not None:
            raise EngineFault(NOT_CHECKPOINTABLE, f"rank {rank} can't be taken off its GPU: {why}")


class _Weights:
    """As `pool.vllm_weights.VllmWeights`, of all ranks."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    @property
    def own(self) -> bool:
        return any(word.own for word in self._gang.words)

    @property
    def attached(self) -> str | None:
        names = [word.attached for word in self._gang.words]
        return JOINT.join(name or "" for name in names) if any(names) else None

    @property
    def shared_bytes(self) -> int:
        return sum(word.shared_bytes for word in self._gang.words)

    @property
    def bytes_mapped(self) -> int:
        return sum(word.bytes_mapped for word in self._gang.words)

    def take_own(self) -> None:
        self._gang.order("take_own")

    def drop_own(self) -> None:
        self._gang.order("drop_own")

    def detach(self) -> None:
        self._gang.order("detach")

    def deposit(self, pool_socket: str, source: str, form: str) -> Staged:
        found = self._gang.order("deposit", pool_socket, source, form, deadline_s=DEPOSIT_S)
        return Staged(
            weight_set=JOINT.join(name for name, _, _ in found), size_bytes=sum(size for _, size, _ in found),
            read_bytes=sum(read for _, _, read in found), took_ms=0,
        )  # fmt: skip


class _Kv:
    """As `pool.vllm_backend.Kv`, of all ranks. What is there already is not asked for again."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    @property
    def size_bytes(self) -> int:
        return sum(word.bytes_kv for word in self._gang.words)

    def create(self) -> None:
        if not all(word.bytes_kv for word in self._gang.words):
            self._gang.order("kv_create")

    def release(self) -> None:
        if any(word.bytes_kv for word in self._gang.words):
            self._gang.order("kv_release")
