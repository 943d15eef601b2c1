"""What the files of a directory say of a model without it being built: configuration, sizes, KV memory a token."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from pool.safetensors import BadSource, Source, read_source
from worker.sources.report import CantUse

_NEEDED: Final = ("config.json", "tokenizer.json")
_CAST: Final = frozenset({"F32", "F16", "BF16"})
"""They lie in the engine's dtype, two bytes each, once they are loaded; quantised ones stay as they are."""
_ITEM_BYTES: Final = 2
_PADDING: Final = 64
"""Segments are multiples of 2 MiB and some hold the engine's scratch as well: one part in so many covers it."""


@dataclass(frozen=True)
class Headers:
    directory: Path
    config: Any
    """As Transformers reads it."""
    weights: Source

    @property
    def text(self) -> Any:
        return self.config.get_text_config()

    @property
    def weight_bytes(self) -> int:
        """Once they are loaded."""
        entries = self.weights.entries
        plain = sum(prod(one.shape) * _ITEM_BYTES if one.dtype in _CAST else one.size_bytes for one in entries)
        return plain + plain // _PADDING

    @property
    def longest(self) -> int:
        """Tokens that its positions reach."""
        return int(getattr(self.text, "max_position_embeddings", 0) or 2**31)

    @property
    def token_bytes(self) -> int:
        """KV memory of one token, where all layers attend to everything."""
        text = self.text
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        size = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        return 2 * int(text.num_hidden_layers) * heads * size * _ITEM_BYTES


def headers(directory: Path) -> Headers:
    """Raises CantUse (`bad_source`), OSError."""
    if absent := [name for name in _NEEDED if not (directory / name).exists()]:
        raise CantUse("bad_source", f"{directory} has no {absent[0]}")
    try:
        weights = read_source(str(directory))
    except BadSource as error:
        raise CantUse("bad_source", str(error)) from error
    return Headers(directory, _config(directory), weights)


def _config(directory: Path) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 (2 s, and only here)

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CantUse("bad_source", f"{directory / 'config.json'}: {error}") from error
