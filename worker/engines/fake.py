"""The fake engine: a real process that maps real pool memory, with scripted delays, rates and failures.

Tokens are bytes, 256 ends a text. What it says depends on the prompt's ids alone, so an answer can be compared with itself
after any swap, and a text that was cut or repeated shows.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from pool.messages import Tensor
from worker.engines.fakeranks import FakeRanks
from worker.engines.interface import IDLE, EngineFault, Output, Stepped, staged_from_files
from worker.engines.messages import Sampling, State, Stocked
from worker.engines.pretence import CONTEXT_TOKENS, IDENTITY
from worker.engines.weights import Weights
from worker.processes import private_bytes

EOS: Final = 256
MAX_NUM_SEQS: Final = 8
PREFIX: Final = b"You said: "


def answer_of(prompt: tuple[int, ...]) -> bytes:
    """Return what the fake says after `prompt`: the prompt itself, behind a few words."""
    return PREFIX + bytes(token for token in prompt if token < EOS)


class _Running:
    __slots__ = ("answer", "count", "limit", "request", "sampling")

    def __init__(self, request: str, prompt: tuple[int, ...], sampling: Sampling, room: int) -> None:
        self.request, self.sampling = request, sampling
        self.answer = answer_of(prompt)
        self.count = 0
        self.limit = min(sampling.max_tokens, room)


class FakeEngine:
    """`arguments`: those of the allow-list. `source`: the model's directory, where the counts of failures are kept.

    `ranks`: more than one is a gang's, each a process of its own beside this one.
    """

    def __init__(self, source: Path, arguments: dict[str, Any], *, ranks: int = 1) -> None:
        self._source, self._arguments = source, arguments
        self._weights = Weights()
        self._identity: tuple[Tensor, bytes] | None = None
        self._awake = False
        self._kept = 0
        """KV bytes that a sleep has left behind (`keep_fraction`)."""
        self._requests: dict[str, _Running] = {}
        self._emitted = 0
        self._next_at = 0.0
        self._pause("load_ms")
        if self._fails("start"):
            raise SystemExit("told to fail at the start")
        self._ranks, self._count = FakeRanks(ranks) if ranks > 1 else None, ranks

    def attach(self, pool_socket: str, weight_set: str) -> None:
        mapped = self._weights.mapped
        if mapped is not None and mapped.weight_set == weight_set:
            return
        if mapped is not None:
            raise EngineFault("busy", f"{mapped.weight_set} is mapped: detach it first")
        attachment = self._weights.reference(pool_socket, weight_set)
        tensor = next((tensor for tensor in attachment.attached.tensors if tensor.name == IDENTITY), None)
        if tensor is None:
            attachment.close()
            raise EngineFault("layout", f"{weight_set} has no tensor {IDENTITY!r}: it is not a fake model's")
        self._weights.map(attachment)
        found = self._weights.view(tensor).tobytes()
        if blake3(found).hexdigest() != tensor.digest:
            self._weights.unmap()
            raise EngineFault("corrupt", f"{IDENTITY} of {weight_set} is not what the pool says it is")
        if self._ranks is not None:
            try:
                self._ranks.order("attach", pool_socket=pool_socket, weight_set=weight_set)
            except EngineFault:
                self._ranks.order("detach")
                self._weights.unmap()
                raise
        self._identity = (tensor, found)

    def detach(self) -> None:
        if self._awake:
            raise EngineFault("busy", "awake: put it to sleep first")
        if self._ranks is not None:
            self._ranks.order("detach")
        self._weights.unmap()
        self._identity = None

    def wake(self, model: str) -> None:
        if self._identity is None:
            raise EngineFault("not_attached", "no weight set is mapped")
        self._pause("wake_ms")
        if self._fails("wake"):
            raise EngineFault("failed", f"told to fail at the wake of {model}")
        if self._ranks is not None:
            try:
                self._ranks.order("wake", fail=self._fails("rank_wake"))
            except EngineFault:
                self._ranks.order("sleep")
                raise
        self._awake = True

    def sleep(self) -> None:
        if self._requests:
            raise EngineFault("busy", f"{len(self._requests)} requests run: drain first")
        self._pause("sleep_ms")
        if self._fails("sleep"):
            raise EngineFault("failed", "told to fail at the sleep")
        if self._ranks is not None:
            self._ranks.order("sleep")
        self._kept = int(self._arguments.get("kv_bytes", 0) * self._arguments.get("keep_fraction", 0.0))
        self._awake = False

    def submit(self, request: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        if not self._awake:
            raise EngineFault("not_awake", "asleep")
        context = int(self._arguments.get("context_tokens", CONTEXT_TOKENS))
        if len(prompt) >= context:
            raise EngineFault("too_long", f"a prompt of {len(prompt)} tokens in a context of {context}")
        self._look()
        if not self._requests:
            self._next_at = time.monotonic()
        self._requests[request] = _Running(request, prompt, sampling, context - len(prompt))

    def abort(self, request: str) -> bool:
        return self._requests.pop(request, None) is not None

    def check(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        if not self._awake:
            raise EngineFault("not_awake", "asleep")
        self._look()
        answer = answer_of(prompt)
        return tuple(answer[:tokens]) + ((EOS,) if len(answer) < tokens else ())

    def step(self) -> Stepped:
        if not self._requests:
            return IDLE
        rate = float(self._arguments.get("tokens_per_s", 0))
        now = time.monotonic()
        if rate:
            if now < self._next_at:
                return Stepped((), self._next_at - now)
            self._next_at = max(self._next_at + 1 / rate, now - 1)  # catches up after a pause, by a second at most
        most = int(self._arguments.get("max_num_seqs", MAX_NUM_SEQS))
        outputs = tuple(self._advance(running) for running in list(self._requests.values())[:most])
        for output in outputs:
            if output.reason is not None:
                del self._requests[output.request]
        if not self._requests:
            return Stepped(outputs, None)
        return Stepped(outputs, max(0.0, self._next_at - time.monotonic()) if rate else 0.0)

    def stage(self, pool_socket: str, source: str, form: str) -> Stocked:
        raise staged_from_files()

    def scrub(self) -> None:
        if self._awake or self._weights.mapped is not None:
            raise EngineFault("busy", "put it to sleep and detach it first")
        if self._ranks is not None:
            self._ranks.order("checkpoint_prepare")
        self._requests.clear()

    def revived(self) -> None:
        if self._ranks is not None:
            self._ranks.order("checkpoint_restore")
        self._next_at = 0.0

    def moved(self, device: str) -> None:
        if self._awake or self._weights.mapped is not None:
            raise EngineFault("busy", "put it to sleep and detach it first")

    def running(self) -> int:
        return len(self._requests)

    def state(self) -> State:
        mapped = self._weights.mapped
        kv = int(self._arguments.get("kv_bytes", 0)) if self._awake else self._kept
        private = int(self._arguments.get("skeleton_bytes", 0)) or private_bytes(os.getpid())
        return State(
            attached=mapped.weight_set if mapped is not None else None, awake=self._awake, running=len(self._requests),
            bytes_mapped=self._weights.bytes_mapped, bytes_kv=kv, bytes_private=private * self._count + kv,
        )  # fmt: skip

    def _advance(self, running: _Running) -> Output:
        """One more token of one request; `running.limit` tokens are its most."""
        what, _, count = str(self._arguments.get("fail", "")).partition(":")
        if what == "generate_after" and self._emitted >= int(count or 0):
            os.kill(os.getpid(), signal.SIGKILL)
        endless = running.sampling.ignore_eos or bool(self._arguments.get("ignore_stop", False))
        if running.count >= len(running.answer) and not endless:
            return Output(running.request, (), "stop")
        token = running.answer[running.count % len(running.answer)]
        running.count += 1
        self._emitted += 1
        if token in running.sampling.stop_ids and not endless:
            return Output(running.request, (), "stop")
        return Output(running.request, (token,), "length" if running.count >= running.limit else None)

    def _look(self) -> None:
        """Read the mapped memory: what is there must still be this weight set."""
        assert self._identity is not None
        tensor, before = self._identity
        if not np.array_equal(self._weights.view(tensor), np.frombuffer(before, np.uint8)):
            raise EngineFault("corrupt", f"{IDENTITY} has changed under the mapping", fatal=True)

    def _pause(self, argument: str) -> None:
        time.sleep(int(self._arguments.get(argument, 0)) / 1000)

    def _fails(self, step: str) -> bool:
        """Whether this step is one of those that must fail; counted per model, over all processes."""
        what, _, count = str(self._arguments.get("fail", "")).partition(":")
        if what != step:
            return False
        if not count:
            return True
        counter = self._source / f"failed-{step}"
        done = len(counter.read_bytes()) if counter.exists() else 0
        if done >= int(count):
            return False
        with counter.open("ab") as file:
            file.write(b".")
        return True
