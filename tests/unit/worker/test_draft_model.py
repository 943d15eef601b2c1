"""Weights are kept by the configuration that the plane knows: a draft that has changed since is not used under it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from controlplane.fleet import Model
from controlplane.spec import ModelFacts, ModelSpec
from worker.board import Board
from worker.failure import StepFailed
from worker.moves import Goal
from worker.shelf import Shelf
from worker.sources import Prepared
from worker.stock import Stock

FACTS = ModelFacts(configuration="cfg_1", architecture="LlamaForCausalLM", weight_bytes=1, kv_bytes=1, context_tokens=16)
SPEC = ModelSpec(name="a", source="/models/a", engine="vllm", arguments={"draft_model": "/models/small"})
MODEL = Model(model="a", spec=SPEC, revision=1, origin="api", registered_ms=0, facts=FACTS)


def stock(found: Prepared) -> Stock:
    async def prepare(model: Model, progress: object) -> Prepared:
        return found

    desired: Any = SimpleNamespace(models={"a": MODEL}, dismissed=frozenset())
    return Stock(Shelf(prepare, "/nowhere"), lambda: desired, lambda report: None, Board())


async def test_a_draft_as_it_was_inspected_is_used(tmp_path: Path) -> None:
    shelved = await stock(Prepared(tmp_path, FACTS, tmp_path)).prepared(Goal("a", 1), lambda done, total: None)
    assert shelved.draft == tmp_path


async def test_one_that_has_changed_since_is_refused_with_both_configurations(tmp_path: Path) -> None:
    changed = msgspec.structs.replace(FACTS, configuration="cfg_2")
    with pytest.raises(StepFailed, match="cfg_1 and would be cfg_2 now: its draft_model") as failed:
        await stock(Prepared(tmp_path, changed, tmp_path)).prepared(Goal("a", 1), lambda done, total: None)
    assert (failed.value.code, failed.value.final) == ("draft_changed", True)
