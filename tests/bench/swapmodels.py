"""Random models of real shapes: a checkpoint directory that vLLM and Transformers load. Same shape, other seed: a fine-tune."""

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

SHAPES = {
    "tiny": {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
             "num_key_value_heads": 4, "vocab_size": 8192},
    "1.5b": {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936},
    "8b": {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 151936},
}  # fmt: skip
_SHARDS = 8


def make(directory: Path, shape: str, seed: int) -> Path:
    """Write it, unless it is there already."""
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    sizes = SHAPES[shape]
    tensors = list(_tensors(sizes).items())
    names: dict[str, str] = {}

    def shard(number: int) -> None:
        file = f"model-{number + 1:05d}-of-{_SHARDS:05d}.safetensors"
        own = tensors[number::_SHARDS]
        for name, _ in own:
            names[name] = file
        _write(directory / file, own, seed * 1000 + number)

    with ThreadPoolExecutor(_SHARDS) as threads:
        list(threads.map(shard, range(_SHARDS)))
    index = {"metadata": {}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
        "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, **sizes,
        "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _tensors(of: dict[str, int]) -> dict[str, tuple[int, ...]]:
    hidden, inner = of["hidden_size"], of["intermediate_size"]
    kv = hidden // of["num_attention_heads"] * of["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (of["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(of["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {
            at + "self_attn.q_proj.weight": (hidden, hidden), at + "self_attn.k_proj.weight": (kv, hidden),
            at + "self_attn.v_proj.weight": (kv, hidden), at + "self_attn.o_proj.weight": (hidden, hidden),
            at + "mlp.gate_proj.weight": (inner, hidden), at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner), at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    return found


def _write(path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors:
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header).encode()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, shape in tensors:
            made = torch.empty(shape, dtype=torch.bfloat16, device=device)
            made = (
                made.normal_(0, 0.02, generator=generator) if len(shape) > 1 else made.uniform_(0.9, 1.1, generator=generator)
            )
            file.write(made.cpu().view(torch.uint8).numpy().data)


if __name__ == "__main__":
    import sys

    make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
