"""Choosing the next token of one sequence. Each has its own generator, so that its choices don't depend on its neighbours."""

from typing import Final

import torch

from worker.engines.messages import Sampling

COLDEST: Final = 1e-4
"""Below this temperature the likeliest token is taken: logits divided by less overflow, and chances of NaN end the engine."""


class Sampler:
    """`prompt`: ids that the repetition penalty counts besides the output's own."""

    def __init__(self, sampling: Sampling, prompt: tuple[int, ...]) -> None:
        self._sampling = sampling
        self._prompt = prompt
        self._counts: dict[int, int] = {}
        self._generator = torch.Generator()
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed % 2**63)
        else:
            self._generator.seed()
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1)
        self._penalised = any(penalties)
        self._held = bool(sampling.min_tokens) and not sampling.ignore_eos
        self._greedy = sampling.temperature < COLDEST
        self.plain = self._greedy and not self._penalised and not self._held
        """The likeliest token is the choice: all such rows of a batch are chosen at once."""

    def choose(self, logits: torch.Tensor, count: int) -> int:
        """Return the next id, given the logits [vocabulary] after `count` tokens of output."""
        sampling = self._sampling
        if self._penalised or (self._held and count < sampling.min_tokens):
            logits = self._weighed(logits.clone(), count)
        if self._greedy:
            return int(logits.argmax())
        probabilities = torch.softmax(self._narrowed(logits / sampling.temperature), dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def note(self, token: int) -> None:
        """`token` has become part of the output."""
        if self._penalised:
            self._counts[token] = self._counts.get(token, 0) + 1

    def _weighed(self, logits: torch.Tensor, count: int) -> torch.Tensor:
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            seen = torch.tensor(sorted({*self._prompt, *self._counts}), dtype=torch.long)
            found = logits[seen]
            logits[seen] = torch.where(found > 0, found / sampling.repetition_penalty, found * sampling.repetition_penalty)
        if self._counts:
            ids = torch.tensor(list(self._counts), dtype=torch.long)
            often = torch.tensor(list(self._counts.values()), dtype=logits.dtype)
            logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * often
        if self._held and count < sampling.min_tokens:
            logits[list(sampling.stop_ids)] = -torch.inf
        return logits

    def _narrowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Leave only the `top_k` likeliest, and of those the fewest that have `top_p` together."""
        sampling = self._sampling
        if 0 < sampling.top_k < len(logits):
            least = torch.topk(logits, sampling.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if sampling.top_p < 1:
            ordered, order = logits.sort(descending=True)
            before = torch.softmax(ordered, dim=-1).cumsum(-1) - torch.softmax(ordered, dim=-1)
            dropped = before >= sampling.top_p
            dropped[0] = False  # the likeliest stays, also at 0
            logits = logits.index_fill(0, order[dropped], -torch.inf)
        return logits
