"""Sources of engines that load files themselves: opened by their headers."""

from pathlib import Path
from typing import Any

import pytest

from tests.tinymodels import tiny
from worker.sources.ownlayout import open_own
from worker.sources.report import CantUse

MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("own") / "one", "llama", seed=1)


def opened(source: Path, **arguments: Any) -> Any:
    return open_own(str(source), source.parent, arguments)


def test_weights_are_counted_in_the_engines_dtype(source: Path) -> None:
    found = opened(source, kv_bytes=16 * MIB)
    assert found.architecture == "LlamaForCausalLM"
    assert found.parameters * 2 <= found.weight_bytes < found.parameters * 2.1, "float32 in the file, bfloat16 in the engine"
    assert (found.kv_bytes, found.context_tokens, found.source_dir) == (16 * MIB, 256, str(source))


def test_siblings_are_one_skeleton(source: Path, tmp_path: Path) -> None:
    assert opened(tiny(tmp_path / "two", "llama", seed=2)).skeleton == opened(source).skeleton


def test_without_max_model_len_the_context_is_what_the_kv_memory_holds(source: Path) -> None:
    token_bytes = 2 * 2 * 2 * 8 * 2  # keys and values, layers, heads, head size, bfloat16
    assert opened(source, kv_bytes=100 * token_bytes).context_tokens == 96


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"max_model_len": 512}, "own limit is 256"), ({"max_model_len": 256, "kv_bytes": 1000}, "32.0 KiB of KV")],
)
def test_what_can_not_be_is_refused_with_both_numbers(source: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(CantUse, match=says) as caught:
        opened(source, **arguments)
    assert caught.value.code == "cannot_fit"


def test_a_directory_without_a_tokenizer_is_named(source: Path, tmp_path: Path) -> None:
    other = tiny(tmp_path / "bare", "llama")
    (other / "tokenizer.json").unlink()
    with pytest.raises(CantUse, match=r"no tokenizer\.json"):
        opened(other)
    with pytest.raises(CantUse, match="GGUF"):
        open_own(str(tmp_path / "x.gguf"), tmp_path, {})
