"""Choosing a token: limits and penalties do what their names say."""

import pytest
import torch

from worker.engines.messages import Sampling
from worker.engines.sampling import Sampler

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])


def chosen(sampling: Sampling, times: int = 300, prompt: tuple[int, ...] = ()) -> set[int]:
    sampler = Sampler(sampling, prompt)
    return {sampler.choose(LOGITS, 0) for _ in range(times)}


def test_temperature_zero_is_greedy() -> None:
    assert chosen(Sampling(max_tokens=9, temperature=0)) == {1}


@pytest.mark.parametrize("temperature", [1e-5, 1e-40, 5e-324])
def test_a_temperature_that_is_next_to_nothing_is_greedy_and_ends_no_engine(temperature: float) -> None:
    assert chosen(Sampling(max_tokens=9, temperature=temperature)) == {1}
    penalised = Sampling(max_tokens=9, temperature=temperature, frequency_penalty=0.5)
    assert chosen(penalised) == {1}


def test_top_k_leaves_the_likeliest() -> None:
    assert chosen(Sampling(max_tokens=9, temperature=2, top_k=2, seed=1)) == {1, 2}


def test_top_p_leaves_the_fewest_that_have_it_together() -> None:
    assert chosen(Sampling(max_tokens=9, temperature=1, top_p=0.5, seed=1)) == {1}
    assert chosen(Sampling(max_tokens=9, temperature=1, top_p=0.8, seed=1)) == {1, 2}
    assert chosen(Sampling(max_tokens=9, temperature=1, top_p=0, seed=1)) == {1}


def test_without_limits_everything_can_come() -> None:
    assert chosen(Sampling(max_tokens=9, temperature=2, seed=1), 3000) == {0, 1, 2, 3, 4}


def test_min_tokens_holds_the_end_back() -> None:
    held = Sampler(Sampling(max_tokens=9, temperature=0, min_tokens=2, stop_ids=(1,)), ())
    assert not held.plain
    assert [held.choose(LOGITS, count) for count in range(3)] == [2, 2, 1]


def test_penalties_count_what_was_said() -> None:
    frequency = Sampler(Sampling(max_tokens=9, temperature=0, frequency_penalty=1.5), (1, 1, 1))
    assert frequency.choose(LOGITS, 0) == 1, "the prompt does not count"
    frequency.note(1)
    assert frequency.choose(LOGITS, 1) == 2
    repetition = Sampler(Sampling(max_tokens=9, temperature=0, repetition_penalty=2.0), (1,))
    assert repetition.choose(LOGITS, 0) == 2, "the prompt counts"
    assert LOGITS.tolist() == [0.0, 3.0, 2.0, 1.0, -1.0]
