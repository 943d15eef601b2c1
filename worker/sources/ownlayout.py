"""Sources of engines that load files themselves: what their headers say, without a model being built."""

from math import prod
from pathlib import Path
from typing import Any, Final

from pool.safetensors import BadSource, Source, read_source
from worker.engines.vllm_arguments import KV_BYTES
from worker.sources.configuration import normalised
from worker.sources.hub import fetch
from worker.sources.report import CantUse, Inspected

_NEEDED: Final = ("config.json", "tokenizer.json")
_CAST: Final = frozenset({"F32", "F16", "BF16"})
"""They lie in the engine's dtype, two bytes each, once they are loaded; quantised ones stay as they are."""
_ITEM_BYTES: Final = 2
_BLOCK_TOKENS: Final = 16
_PADDING: Final = 64
"""Segments are multiples of 2 MiB and some hold the engine's scratch as well: one part in so many covers it."""
_FULL: Final = frozenset({"full_attention"})
"""Other kinds of layers, and compressed keys, take less; the engine itself knows how much."""
MAX_NUM_SEQS: Final = 64


def open_own(source: str, models: Path, arguments: dict[str, Any]) -> Inspected:
    """Return what is to be known of `source` before an engine loads it.

    Raises:
        CantUse.
    """
    if source.endswith(".gguf"):
        raise CantUse("bad_source", f"{source}: this engine reads directories of safetensors files; use transformers for GGUF")
    directory = fetch(source, models) if source.startswith("hf:") else Path(source).resolve(strict=True)
    if absent := [name for name in _NEEDED if not (directory / name).exists()]:
        raise CantUse("bad_source", f"{directory} has no {absent[0]}")
    try:
        weights = read_source(str(directory))
    except BadSource as error:
        raise CantUse("bad_source", str(error)) from error
    config = _config(directory)
    text = config.get_text_config()
    kv_bytes = int(arguments.get("kv_bytes", KV_BYTES))
    return Inspected(
        source_dir=str(directory), architecture=str((config.architectures or ["unknown"])[0]), skeleton=normalised(config),
        parameters=sum(prod(one.shape) for one in weights.entries), weight_bytes=_bytes(weights), kv_bytes=kv_bytes,
        context_tokens=_context(text, arguments, kv_bytes), max_num_seqs=int(arguments.get("max_num_seqs", MAX_NUM_SEQS)),
    )  # fmt: skip


def _config(directory: Path) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 (2 s, and only here)

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CantUse("bad_source", f"{directory / 'config.json'}: {error}") from error


def _bytes(weights: Source) -> int:
    plain = sum(prod(one.shape) * _ITEM_BYTES if one.dtype in _CAST else one.size_bytes for one in weights.entries)
    return plain + plain // _PADDING


def _context(text: Any, arguments: dict[str, Any], kv_bytes: int) -> int:
    """As asked for, else what model and KV memory hold. Raises CantUse when a sequence of that length has no room."""
    longest = int(getattr(text, "max_position_embeddings", 0) or 2**31)
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    size = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    token_bytes = 2 * int(text.num_hidden_layers) * heads * size * _ITEM_BYTES
    room = kv_bytes // token_bytes // _BLOCK_TOKENS * _BLOCK_TOKENS
    asked = int(arguments.get("max_model_len", min(longest, room)))
    if asked > longest:
        raise CantUse("cannot_fit", f"max_model_len is {asked}; the model's own limit is {longest}")
    plain = not getattr(text, "kv_lora_rank", None) and set(getattr(text, "layer_types", None) or ()) <= _FULL
    if plain and not 0 < asked <= room:
        raise CantUse(
            "cannot_fit",
            f"a sequence of {asked or _BLOCK_TOKENS} tokens takes {(asked or _BLOCK_TOKENS) * token_bytes} bytes of KV, and "
            f"kv_bytes is {kv_bytes}: raise it, or lower max_model_len",
        )
    return asked
