"""Captured CUDA graphs are counted, once each, in whatever way they are captured."""

from typing import Any

import pytest

from pool import vllm_graphs

torch = pytest.importorskip("torch")


class Graph:
    """torch's, without a GPU."""

    def capture_end(self, *, fails: bool = False) -> str:
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return "captured"


def test_each_capture_that_succeeds_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = type("Graph", (Graph,), {"capture_end": Graph.capture_end})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    before = vllm_graphs.captured()
    vllm_graphs.count()
    vllm_graphs.count()
    assert [graph().capture_end() for _ in range(3)] == ["captured"] * 3
    with pytest.raises(RuntimeError, match="not permitted"):
        graph().capture_end(fails=True)
    assert vllm_graphs.captured() - before == 3


def test_a_torch_without_graphs_has_captured_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = vllm_graphs.captured()
    monkeypatch.delattr(torch.cuda, "CUDAGraph")
    vllm_graphs.count()
    assert vllm_graphs.captured() == before


def test_torch_has_what_is_counted() -> None:
    assert callable(torch.cuda.CUDAGraph.capture_end)
