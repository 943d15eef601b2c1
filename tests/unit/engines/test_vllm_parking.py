"""What an engine core has of its callers' ids is gone before an image of it is written."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from worker.engines import vllm_parking


def test_ids_of_callers_and_of_what_was_drafted_for_them_are_overwritten() -> None:
    batch, drafted = np.full(4, 7), [torch.full((4,), 7) for _ in range(5)]
    drafter = SimpleNamespace(
        input_ids=drafted[0], backup_next_token_ids=SimpleNamespace(cpu=drafted[1], gpu=drafted[2]),
    )  # fmt: skip
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(token_ids_cpu=batch), drafter=drafter, _draft_token_ids=drafted[3],
        draft_token_ids_cpu=drafted[4],
    )  # fmt: skip
    vllm_parking.scrub(_core(runner))
    assert not batch.any()
    assert not any(one.any() for one in drafted)


def test_a_core_without_a_model_that_drafts_has_none() -> None:
    vllm_parking.scrub(_core(SimpleNamespace(input_batch=None, drafter=None, draft_token_ids_cpu=None)))


def test_stacks_of_a_gpu_shrink_while_it_is_parked_and_are_back_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def stacks(size_bytes: int) -> int:
        told.append(size_bytes)
        return 1024

    monkeypatch.setattr(vllm_parking, "cuda", lambda: SimpleNamespace(stacks=stacks))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    vllm_parking.revived(vllm_parking.scrub(_core(SimpleNamespace())))
    assert told == [vllm_parking.PARKED_STACK_BYTES, 1024]


def test_a_driver_that_keeps_them_as_they_are_keeps_no_engine_from_being_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def stacks(size_bytes: int) -> int:
        told.append(size_bytes)
        raise OSError(1, "cuCtxSetLimit: CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(vllm_parking, "cuda", lambda: SimpleNamespace(stacks=stacks))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    vllm_parking.revived(vllm_parking.scrub(_core(SimpleNamespace())))
    assert told == [vllm_parking.PARKED_STACK_BYTES], "and nothing is put back"


def test_without_a_gpu_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(vllm_parking, "cuda")
    vllm_parking.revived(vllm_parking.scrub(_core(SimpleNamespace())))


def _core(runner: Any) -> Any:
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    return SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
