"""Random checkpoints of real shapes, as vLLM and Transformers load them: `python -m compose.bench.checkpoints DIR SHAPE SEED`.

Same shape, other seed: a fine-tune. What such a model says is noise, but the same noise every time.
"""

import json
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from compose.bench.shapes import Shape, shape_of

_SHARDS: Final = 8
_FP8_SCALE: Final = 0.0005
"""Values of a standard deviation of 0.02 then fill the range of 8 bits well (448 is its end)."""


def make(directory: Path, name: str, seed: int) -> Path:
    """Write it, unless it is there already."""
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    shape = shape_of(name)
    made_up: list[tuple[str, str, tuple[int, ...]]] = [("made_up", "F32", ())]
    chosen = made_up if shape.dummy else list(tensors(shape))
    names: dict[str, str] = {}

    def shard(number: int) -> None:
        file = f"model-{number + 1:05d}-of-{_SHARDS:05d}.safetensors"
        own = chosen[number::_SHARDS]
        names.update((name, file) for name, _, _ in own)
        if own:
            _write(directory / file, own, seed * 1000 + number)

    with ThreadPoolExecutor(_SHARDS) as threads:
        list(threads.map(shard, range(_SHARDS)))
    index = {"metadata": {}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(shape.config()))  # last: it says that the rest is there
    return directory


def tensors(of: Shape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype, extents of all."""
    hidden = of.hidden_size
    yield "model.embed_tokens.weight", "BF16", (of.vocab_size, hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    if not of.tied:
        yield "lm_head.weight", "BF16", (of.vocab_size, hidden)
    for layer in range(of.layers):
        at = f"model.layers.{layer}."
        query, kv = of.heads * of.head_dim, of.kv_heads * of.head_dim
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", "BF16", (hidden,)
        if of.experts:  # Qwen3 has a norm on each head's query and key
            yield at + "self_attn.q_norm.weight", "BF16", (of.head_dim,)
            yield at + "self_attn.k_norm.weight", "BF16", (of.head_dim,)
        for name, rows, columns in (("q", query, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, query)):
            yield from _linear(of, f"{at}self_attn.{name}_proj", rows, columns)
        if not of.experts:
            yield from _mlp(of, at + "mlp")
            continue
        yield at + "mlp.gate.weight", "BF16", (of.experts, hidden)
        for expert in range(of.experts):
            yield from _mlp(of, f"{at}mlp.experts.{expert}")


def _mlp(of: Shape, at: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for name, rows, columns in (
        ("gate", of.inner_size, of.hidden_size),
        ("up", of.inner_size, of.hidden_size),
        ("down", of.hidden_size, of.inner_size),
    ):
        yield from _linear(of, f"{at}.{name}_proj", rows, columns)


def _linear(of: Shape, name: str, rows: int, columns: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield name + ".weight", "F8_E4M3" if of.fp8 else "BF16", (rows, columns)
    if of.fp8:
        yield name + ".weight_scale", "F32", ()


def _write(path: Path, tensors: list[tuple[str, str, tuple[int, ...]]], seed: int) -> None:
    header: dict[str, Any] = {}
    at = 0
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    for name, dtype, extents in tensors:
        size = sizes[dtype] * torch.Size(extents).numel()
        header[name] = {"dtype": dtype, "shape": extents, "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header).encode()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, dtype, extents in tensors:
            file.write(_values(dtype, extents, device, generator).cpu().contiguous().view(torch.uint8).numpy().data)


def _values(dtype: str, extents: tuple[int, ...], device: str, generator: torch.Generator) -> torch.Tensor:
    if dtype == "F32":
        return torch.full((1,), _FP8_SCALE)
    made = torch.empty(extents, dtype=torch.bfloat16, device=device)
    if len(extents) == 1:
        return made.uniform_(0.9, 1.1, generator=generator)
    made.normal_(0, 0.02, generator=generator)
    return (made / _FP8_SCALE).clamp_(-448, 448).to(torch.float8_e4m3fn) if dtype == "F8_E4M3" else made


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
