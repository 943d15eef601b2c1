"""Keys and values of all sequences of an engine: a slot of full length for each, in one block of memory.

The block is reserved once. Pages come as tokens are written and all go back at `clear`, whatever malloc thinks of it: that is
what makes a sleeping engine small.
"""

import mmap
from typing import Any, Final

import msgspec
import torch

from controlplane.quantities import need_and_limit

MAX_NUM_SEQS: Final = 4
_MAP_NORESERVE: Final = 0x4000
"""Of Linux; Python 3.11 has no name for it."""
MOST_KV_BYTES: Final = 2**30
"""Unless the model's spec gives `kv_bytes`."""


class KvShape(msgspec.Struct, frozen=True, kw_only=True):
    layers: int
    heads: int
    head_size: int
    context_tokens: int
    slots: int
    item_bytes: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_size * self.item_bytes

    @property
    def size_bytes(self) -> int:
        return self.slots * self.context_tokens * self.token_bytes


class Unsuited(ValueError):
    """This engine can't serve that model, or not with these arguments; the message has both numbers."""


def kv_shape(config: Any, arguments: dict[str, Any], item_bytes: int) -> KvShape:
    """Return the shape for a Transformers configuration and the engine's arguments.

    Raises:
        Unsuited.
    """
    text = config.get_text_config()
    longest = int(getattr(text, "max_position_embeddings", 0) or 2**31)
    context = int(arguments.get("max_model_len", longest))
    if context > longest:
        raise Unsuited(f"max_model_len is {context}; the model's own limit is {longest}")
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = int(getattr(text, "sliding_window", None) or 0)
    if kinds - {"sliding_attention"}:
        raise Unsuited(f"its layers of kind {', '.join(sorted(kinds))} are not supported: only attention is")
    if (kinds or (window and getattr(text, "use_sliding_window", True))) and context > window:
        raise Unsuited(f"its attention has a window of {window} tokens; set max_model_len to that or less (it is {context})")
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    one = KvShape(
        layers=int(text.num_hidden_layers), heads=heads, head_size=head_size, context_tokens=context, slots=1,
        item_bytes=item_bytes,
    )  # fmt: skip
    limit = int(arguments.get("kv_bytes", max(MOST_KV_BYTES, one.size_bytes)))
    held = limit // one.size_bytes
    if held < 1:
        need, has = need_and_limit(one.size_bytes, limit)
        raise Unsuited(
            f"one sequence of {context} tokens needs {need} of KV; kv_bytes is {has}: raise it, or lower max_model_len"
        )
    asked = int(arguments.get("max_num_seqs", min(MAX_NUM_SEQS, held)))
    if asked > held:
        need, has = need_and_limit(asked * one.size_bytes, limit)
        raise Unsuited(
            f"max_num_seqs is {asked}, and {asked} sequences of {context} tokens need {need} of KV; "
            f"kv_bytes is {has}{'' if 'kv_bytes' in arguments else ' unless it is given'} and holds {held}: "
            "lower max_num_seqs or max_model_len, or raise kv_bytes"
        )
    return msgspec.structs.replace(one, slots=asked)


class SlotCache:
    """What Transformers' attention layers see as their cache, for the rows and positions of the current forward pass.

    Rows 0..n-1 of a batch are slots 0..n-1 (`decode`), or the one row is one slot (`prefill`).
    """

    is_compileable = False

    def __init__(self, shape: KvShape, dtype: torch.dtype) -> None:
        self.shape = shape
        self._block = mmap.mmap(-1, shape.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        whole = torch.frombuffer(self._block, dtype=dtype)
        self._layers = whole.view(shape.layers, 2, shape.slots, shape.heads, shape.context_tokens, shape.head_size)
        self._rows = slice(0, 0)
        self._at: torch.Tensor | slice = slice(0, 0)
        self._length = 0

    def decode(self, positions: torch.Tensor) -> None:
        """The next pass adds one token to each of the first slots, at `positions` (int64, one a slot)."""
        self._rows = slice(0, len(positions))
        self._at = positions
        self._numbers = torch.arange(len(positions))
        self._length = int(positions.max()) + 1

    def prefill(self, slot: int, start: int, count: int) -> None:
        """The next pass adds `count` tokens to one slot, from position `start` on."""
        self._rows = slice(slot, slot + 1)
        self._at = slice(start, start + count)
        self._length = start + count

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store [rows, heads, tokens, head_size] and return everything up to the longest row's end."""
        layer = self._layers[layer_idx]
        if isinstance(self._at, slice):
            layer[0, self._rows, :, self._at] = keys
            layer[1, self._rows, :, self._at] = values
        else:
            layer[0, self._rows][self._numbers, :, self._at] = keys[:, :, 0]
            layer[1, self._rows][self._numbers, :, self._at] = values[:, :, 0]
        return layer[0, self._rows, :, : self._length], layer[1, self._rows, :, : self._length]

    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence of `length` tokens to another slot."""
        self._layers[:, :, target, :, :length] = self._layers[:, :, source, :, :length]

    def clear(self) -> None:
        """Give all memory back; what is read afterwards is zero."""
        self._block.madvise(mmap.MADV_DONTNEED)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Before the current pass; positions are always given, so nothing depends on it."""
        return self._length - 1
