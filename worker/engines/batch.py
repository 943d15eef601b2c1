"""Continuous batching: several sequences advance together, one token a step; a new one's prompt is read in pieces in between.

Running sequences fill the first slots without a gap, so that a step is one pass over a view of the cache. The one whose prompt
is being read has the slot behind them.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import torch

from worker.engines.interface import Output
from worker.engines.kv import SlotCache
from worker.engines.messages import Sampling
from worker.engines.sampling import Sampler

PIECE_TOKENS: Final = 64
"""Of a prompt at once: about 0.2 s for 135 M parameters on one core, the longest that running sequences wait for it."""

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SlotCache], torch.Tensor]


class Sequence:
    """`length`: tokens in the cache. `last`: the newest token, not yet in the cache."""

    __slots__ = ("count", "last", "length", "prompt", "request", "sampler", "sampling")

    def __init__(self, request: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        self.request, self.prompt, self.sampling = request, prompt, sampling
        self.sampler = Sampler(sampling, prompt)
        self.length = self.count = self.last = 0


class Batch:
    """`forward` is a skeleton's. Requests wait in order of arrival while all slots are taken."""

    def __init__(self, forward: Forward, cache: SlotCache) -> None:
        self._forward, self._cache = forward, cache
        self._running: list[Sequence] = []
        self._reading: Sequence | None = None
        self._waiting: deque[Sequence] = deque()
        self._columns = torch.arange(cache.shape.context_tokens)

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting) + (self._reading is not None)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, request: str) -> bool:
        """Forget a sequence wherever it is, and say whether it was there."""
        if self._reading is not None and self._reading.request == request:
            self._reading = None
            return True
        for sequence in self._waiting:
            if sequence.request == request:
                self._waiting.remove(sequence)
                return True
        for slot, sequence in enumerate(self._running):
            if sequence.request == request:
                self._vacate(slot)
                return True
        return False

    def step(self) -> list[Output]:
        """Read a piece of a prompt, if one waits, and advance all running sequences by a token."""
        outputs = self._advance() if self._running else []
        if self._reading is None and self._waiting and len(self._running) < self._cache.shape.slots:
            self._reading = self._waiting.popleft()
        if self._reading is not None:
            outputs += self._read(self._reading)
        return outputs

    def _read(self, sequence: Sequence) -> list[Output]:
        start, slot = sequence.length, len(self._running)
        piece = sequence.prompt[start : start + PIECE_TOKENS]
        end = start + len(piece)
        positions = self._columns[start:end].unsqueeze(0)
        mask = (self._columns[:end] <= positions.unsqueeze(-1)).unsqueeze(1)
        self._cache.prefill(slot, start, len(piece))
        logits = self._forward(torch.tensor([piece]), positions, mask, self._cache)
        sequence.length = end
        if end < len(sequence.prompt):
            return []
        self._reading = None
        self._running.append(sequence)
        output = self._taken(sequence, sequence.sampler.choose(logits[0], 0))
        if output.reason is not None:
            self._running.pop()
        return [output]

    def _advance(self) -> list[Output]:
        rows = self._running
        ids = torch.tensor([[sequence.last] for sequence in rows])
        positions = torch.tensor([sequence.length for sequence in rows])
        self._cache.decode(positions)
        mask = (self._columns[: int(positions.max()) + 1] <= positions[:, None])[:, None, None]
        logits = self._forward(ids, positions[:, None], mask, self._cache)
        likeliest = logits.argmax(-1).tolist()
        outputs = []
        for row, sequence in enumerate(rows):
            sequence.length += 1
            token = likeliest[row] if sequence.sampler.plain else sequence.sampler.choose(logits[row], sequence.count)
            outputs.append(self._taken(sequence, token))
        for slot in reversed(range(len(outputs))):
            if outputs[slot].reason is not None:
                self._vacate(slot)
        return outputs

    def _taken(self, sequence: Sequence, token: int) -> Output:
        sampling = sequence.sampling
        if token in sampling.stop_ids and not sampling.ignore_eos:
            return Output(sequence.request, (), "stop")
        sequence.last = token
        sequence.count += 1
        sequence.sampler.note(token)
        full = sequence.count >= sampling.max_tokens or sequence.length >= self._cache.shape.context_tokens
        return Output(sequence.request, (token,), "length" if full else None)

    def _vacate(self, slot: int) -> None:
        """Close the gap: the last running sequence moves into it, and the one that is being read follows."""
        last = len(self._running) - 1
        if slot != last:
            self._cache.move(last, slot, self._running[last].length)
            self._running[slot] = self._running[last]
        self._running.pop()
        if self._reading is not None and self._reading.length:
            self._cache.move(last + 1, last, self._reading.length)
