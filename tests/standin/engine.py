"""The vLLM engine on a pretended GPU, or on several: the same orders, the same talk with the pool, memory taken and given back
as there.

What it says follows from the bytes of the weights that are mapped and from the prompt, so an answer tells whose weights it was.
"""

import math
import os
import time
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from controlplane.rungs import NOT_CHECKPOINTABLE
from tests.standin.install import place
from tests.standin.part import GRAPHS, Part
from tests.standin.parts import Parts
from worker.engines.interface import IDLE, EngineFault, Output, Stepped
from worker.engines.messages import Sampling, State, Stocked

LETTERS = 94
"""Ids 0 to 93 are printable in the byte tokenizer of tests."""
CHECK = "check"
DIES_ASLEEP = "dies-asleep"
"""While a file of this name is beside the devices' files, engines die of being put to sleep."""
CLINGS = "clings"
"""While a file of this name is there, the ranks of a gang keep their communicators whatever they are told."""
SHARES = "shares"
"""While a file of this name is there, the ranks of a gang say that they share more than they can give up."""
HOLDS = "holds"
"""While a file of this name is there, engines say no more of what they run than the number of ids in it (empty: none)."""


class VllmEngine:
    def __init__(self, source: Path, arguments: dict[str, Any], *, device: str, bare: bool = False, **_: Any) -> None:
        devices = device.split(",")
        self._arguments, self._ranks = arguments, len(devices)
        self._part = Parts(str(source), arguments, devices) if len(devices) > 1 else Part(str(source), arguments, device)
        self._awake = False
        self._running: dict[str, tuple[Sampling, bytes, int]] = {}

    def stage(self, pool_socket: str, source: str, form: str) -> Stocked:
        begun = time.monotonic()
        if self._part.attached is not None:
            raise EngineFault("busy", "sleep and detach first")
        brought = self._part.bring(pool_socket, source, form)
        took_ms = (time.monotonic() - begun) * 1000
        return Stocked(
            weight_set=brought.weight_set, size_bytes=self._part.size, read_bytes=brought.read_bytes, took_ms=took_ms
        )

    def attach(self, pool_socket: str, weight_set: str) -> None:
        if self._part.attached is not None:
            if self._part.attached == weight_set:
                return
            if not self._awake:
                raise EngineFault("busy", "detach first")
            self._must_rest()
            self._part.unmap()
            self._awake = False
            self._part.map(pool_socket, weight_set)
            self._awake = True
            return
        self._part.map(pool_socket, weight_set)

    def detach(self) -> None:
        if self._awake:
            raise EngineFault("busy", "awake: put it to sleep first")
        self._part.drop_kv()
        self._part.drop_own()
        self._part.unmap()

    def wake(self, model: str) -> None:
        if self._part.attached is None:
            raise EngineFault("not_attached", f"no weight set is mapped for {model}")
        self._part.make_kv()
        self._part.capture_graphs()
        self._awake = True

    def sleep(self) -> None:
        self._must_rest()
        if (place() / DIES_ASLEEP).exists():
            os._exit(139)
        self._part.drop_kv()
        self._awake = False

    def _must_rest(self) -> None:
        if self._running:
            raise EngineFault("busy", f"{len(self._running)} requests run: drain first")

    def submit(self, request: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        if not self._awake:
            raise EngineFault("not_awake", "asleep")
        if len(prompt) >= int(self._arguments["max_model_len"]):
            raise EngineFault("too_long", f"a prompt of {len(prompt)} tokens")
        said = blake3(self._part.weights + msgspec.json.encode(prompt)).digest(length=sampling.max_tokens)
        self._running[request] = (sampling, said, 0)

    def abort(self, request: str) -> bool:
        return self._running.pop(request, None) is not None

    def check(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        self._must_rest()
        self.submit(CHECK, prompt, Sampling(max_tokens=tokens, temperature=0, ignore_eos=True))
        ids: tuple[int, ...] = ()
        while CHECK in self._running:
            ids += tuple(i for output in self.step().outputs for i in output.ids)
        return ids

    def step(self) -> Stepped:
        if not self._running:
            return IDLE
        outputs, most = [], _most()
        for request, (sampling, said, count) in list(self._running.items()):
            if count >= most:
                continue
            last = count + 1 == len(said)
            outputs.append(Output(request, (said[count] % LETTERS,), "length" if last else None))
            if last:
                del self._running[request]
            else:
                self._running[request] = (sampling, said, count + 1)
        return Stepped(tuple(outputs), (0.0005 if outputs else 0.01) if self._running else None)

    def scrub(self) -> None:
        if self._awake or self._part.attached is not None:
            raise EngineFault("busy", "weights or KV memory are there still: sleep and detach first")
        if self._ranks > 1 and (place() / SHARES).exists():
            raise EngineFault(NOT_CHECKPOINTABLE, "rank 1 can't be taken off its GPU: it shares a file")
        if self._ranks > 1 and not (place() / CLINGS).exists():
            self._part.checkpoint_prepare()

    def revived(self) -> None:
        if self._ranks > 1:
            self._part.checkpoint_restore()

    def moved(self, device: str) -> None:
        if self._awake or self._part.attached is not None:
            raise EngineFault("busy", "weights or KV memory are there still: sleep and detach first")
        self._part.moved(device)

    def running(self) -> int:
        return len(self._running)

    def state(self) -> State:
        attached = self._part.attached
        return State(
            attached=attached, awake=self._awake, running=len(self._running), bytes_mapped=self._part.size if attached else 0,
            bytes_kv=self._part.kv_bytes, bytes_own=self._part.own_bytes, bytes_private=0, graphs=GRAPHS * self._ranks,
            graphs_again=self._part.graphs - GRAPHS * self._ranks,
        )  # fmt: skip


def _most() -> float:
    try:
        return int((place() / HOLDS).read_text() or 0)
    except FileNotFoundError:
        return math.inf
