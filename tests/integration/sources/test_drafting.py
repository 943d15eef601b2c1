"""A model that drafts for another: checked beside it, kept by content, part of the configuration."""

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.spec import ModelSpec
from tests.tinymodels import tiny
from worker.sources import SourceRefused, copies, prepare
from worker.sources import prepare as prepare_module
from worker.sources.ownlayout import open_own
from worker.sources.report import CantUse

MIB = 1 << 20
SMALLER = {"num_hidden_layers": 1}
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("pair") / "target", "llama", seed=1)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return tiny(tmp_path / "draft", "llama", seed=2, **SMALLER)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    directory = tmp_path / "models"
    directory.mkdir()
    return directory


def opened(target: Path, models: Path, draft: object = None, **arguments: Any) -> Any:
    named = {} if draft is None else {"draft_model": str(draft)}
    return open_own(str(target), models, arguments | named)


def refused(target: Path, models: Path, draft: object, **arguments: Any) -> CantUse:
    with pytest.raises(CantUse) as caught:
        opened(target, models, draft, **arguments)
    return caught.value


def test_both_models_weights_are_counted_and_kv_memory_holds_both_models_tokens(
    target: Path, draft: Path, models: Path
) -> None:
    alone, beside = opened(target, models), opened(target, models, draft)
    assert beside.weight_bytes == alone.weight_bytes + opened(draft, models).weight_bytes
    assert (beside.parameters, beside.skeleton, beside.source_dir) == (alone.parameters, alone.skeleton, alone.source_dir)
    token_bytes = 2 * 2 * 8 * 2  # keys and values, heads, head size, bfloat16; of each of two layers and of one
    memory = 96 * 2 * token_bytes
    assert opened(target, models, kv_bytes=memory).context_tokens == 96
    assert opened(target, models, draft, kv_bytes=memory).context_tokens == 64


def test_a_copy_is_kept_by_content_and_never_changes(target: Path, draft: Path, models: Path, tmp_path: Path) -> None:
    first = Path(opened(target, models, draft).draft_dir)
    assert first.is_absolute()
    assert first.parent == models.resolve()
    weights = (first / "model.safetensors").read_bytes()
    same = tiny(tmp_path / "same", "llama", seed=2, **SMALLER)
    assert Path(opened(target, models, same).draft_dir) == first, "found elsewhere, the same content"
    other = tiny(tmp_path / "other", "llama", seed=3, **SMALLER)
    (draft / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    assert Path(opened(target, models, draft).draft_dir) != first
    assert (first / "model.safetensors").read_bytes() == weights
    assert len(list(models.iterdir())) == 2


def test_what_can_not_draft_is_refused_by_name(target: Path, draft: Path, models: Path, tmp_path: Path) -> None:
    missing = refused(target, models, tmp_path / "nowhere")
    assert (missing.code, missing.final) == ("bad_source", False)
    assert str(missing) == f"draft_model: {tmp_path / 'nowhere'}: No such file or directory"
    assert "draft_model's limit is 128" in str(
        refused(target, models, tiny(tmp_path / "short", "llama", max_position_embeddings=128), max_model_len=200)
    )
    wider = str(refused(target, models, tiny(tmp_path / "wider", "llama", vocab_size=300)))
    assert "draft_model: " in wider
    assert "300 tokens, the model it drafts for 257" in wider
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "2 tokens of 257 differ" in str(refused(target, models, draft))
    (draft / "model.safetensors").write_bytes(b"nothing")
    assert str(refused(target, models, draft)).startswith("draft_model: ")
    assert len(list(models.iterdir())) == 1, "the one that could draft for fewer tokens"


async def test_content_is_part_of_the_configuration_and_the_path_is_not(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prepare_module.__globals__["LIBRARIES"], "vllm", (("torch", "transformers"), "gpu"))
    data = tmp_path / "data"

    async def inspected(**arguments: Any) -> Any:
        spec = ModelSpec(name="m", source=str(target), engine="vllm", arguments={"kv_bytes": 16 * MIB, **arguments})
        return await prepare(spec, data, lambda done, total: None)

    first = await inspected(draft_model=str(draft))
    assert first.draft_dir is not None
    assert first.draft_dir.parent == data / "models"
    assert copies.remove(data / "models", {first.facts.configuration}, ()) == [], "it is known who reads it"
    same = tiny(tmp_path / "same", "llama", seed=2, **SMALLER)
    assert (await inspected(draft_model=str(same))).facts == first.facts
    other = tiny(tmp_path / "other", "llama", seed=3, **SMALLER)
    (draft / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    changed = await inspected(draft_model=str(draft))
    assert changed.facts.configuration != first.facts.configuration
    assert changed.draft_dir != first.draft_dir
    assert (await inspected()).draft_dir is None
    assert copies.remove(data / "models", {changed.facts.configuration}, ()) == [first.draft_dir.name]
    assert changed.draft_dir.is_dir()
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in other.iterdir():
        (linked / file.name).symlink_to(file)
    for place, says in ((linked, "leads out"), (tmp_path / "empty", "No such file"), ("/dev/shm", "engines have one")):
        with pytest.raises(SourceRefused, match=f"^draft_model: .*{says}"):
            await inspected(draft_model=str(place))
