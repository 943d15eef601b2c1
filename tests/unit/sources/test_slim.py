"""A node without PyTorch says so, and what to do, instead of ending in a traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controlplane.spec import ModelSpec
from worker.sources import SourceRefused, prepare


async def test_a_real_model_is_refused_by_name_of_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: Callable[[str], Any] = {"transformers": object()}.get
    monkeypatch.setitem(prepare.__globals__, "find_spec", there)
    with pytest.raises(SourceRefused) as refused:
        await prepare(ModelSpec(name="m", source=str(tmp_path), engine="transformers"), tmp_path, lambda done, total: None)
    assert refused.value.code == "engine_missing"
    assert not refused.value.final, "once it is installed, the next try goes well"
    assert "needs torch, which" in refused.value.message and "pip install 'enginehouse[cpu]'" in refused.value.message
