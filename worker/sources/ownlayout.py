"""Sources of engines that load files themselves: what their headers say, without a model being built."""

from math import prod
from pathlib import Path
from typing import Any, Final

from controlplane.quantities import need_and_limit
from worker.engines.vllm_arguments import KV_BYTES
from worker.sources.configuration import normalised
from worker.sources.drafting import draft_for
from worker.sources.headers import Headers, headers
from worker.sources.hub import fetch
from worker.sources.report import CantUse, Inspected

_BLOCK_TOKENS: Final = 16
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
    found = headers(directory)
    source_of_draft = arguments.get("draft_model")
    draft = draft_for(found, str(source_of_draft), models) if source_of_draft else None
    config, models_there = found.config, [found] if draft is None else [found, draft]
    kv_bytes = int(arguments.get("kv_bytes", KV_BYTES))
    return Inspected(
        source_dir=str(directory), architecture=str((config.architectures or ["unknown"])[0]), skeleton=normalised(config),
        parameters=sum(prod(one.shape) for one in found.weights.entries),
        weight_bytes=sum(one.weight_bytes for one in models_there), kv_bytes=kv_bytes,
        context_tokens=_context(models_there, arguments, kv_bytes), draft_dir=str(draft.directory) if draft else "",
        max_num_seqs=int(arguments.get("max_num_seqs", MAX_NUM_SEQS)),
    )  # fmt: skip


def _context(models: list[Headers], arguments: dict[str, Any], kv_bytes: int) -> int:
    """As asked for, else what model and KV memory hold. Raises CantUse when a sequence of that length has no room.

    A model that drafts has its KV in the same memory, for the same tokens.
    """
    longest, token_bytes = min(one.longest for one in models), sum(one.token_bytes for one in models)
    room = kv_bytes // token_bytes // _BLOCK_TOKENS * _BLOCK_TOKENS
    asked = int(arguments.get("max_model_len", min(longest, room)))
    if asked > longest:
        whose = "the model's own" if models[0].longest == longest else "the draft_model's"
        raise CantUse("cannot_fit", f"max_model_len is {asked}; {whose} limit is {longest}")
    if all(map(_plain, models)) and not 0 < asked <= room:
        tokens = asked or _BLOCK_TOKENS
        need, has = need_and_limit(tokens * token_bytes, kv_bytes)
        raise CantUse(
            "cannot_fit",
            f"a sequence of {tokens} tokens takes {need} of KV, and kv_bytes is {has}: raise it, or lower max_model_len",
        )
    return asked


def _plain(model: Headers) -> bool:
    return not getattr(model.text, "kv_lora_rank", None) and set(getattr(model.text, "layer_types", None) or ()) <= _FULL
