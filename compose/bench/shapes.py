"""Shapes of models that are measured, by name: real sizes, random weights. `tiny-...`: the same kinds, as small as a test."""

from typing import Any, Final

import msgspec

GIB: Final = 1 << 30


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    layers: int
    hidden_size: int
    inner_size: int
    """Of one expert where there are some."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    kv_bytes: int
    """KV memory that its engines are given."""
    experts: int = 0
    experts_per_token: int = 0
    fp8: bool = False
    """Weights of linear layers in 8 bits, one scale each."""
    tied: bool = True
    """Input and output embeddings are one tensor."""
    dummy: bool = False
    """No checkpoint: the engine makes weights up, the same ones every time. For what is too large to be written."""
    draft: str = ""
    """Shape of a model that drafts tokens for this one."""

    @property
    def bytes(self) -> int:
        """Of its weights, within a percent: norms and scales are left out."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        linear = attention + 3 * self.hidden_size * self.inner_size * max(1, self.experts)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return self.layers * linear * (1 if self.fp8 else 2) + embeddings * 2

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        kind = (
            {
                "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token, "moe_intermediate_size": self.inner_size,
                "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
                "intermediate_size": self.inner_size * self.experts_per_token,
            }
            if self.experts
            else {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": self.inner_size}
        )  # fmt: skip
        if self.fp8:
            kind["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
        return {
            **kind, "torch_dtype": "bfloat16", "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0, "tie_word_embeddings": self.tied, "attention_bias": False, "bos_token_id": 1,
            "eos_token_id": 2, "num_hidden_layers": self.layers, "hidden_size": self.hidden_size,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
        }  # fmt: skip


_TINY: Final = Shape(
    layers=4, hidden_size=512, inner_size=1536, heads=8, kv_heads=4, head_dim=64, vocab_size=8192, kv_bytes=GIB
)
_8B: Final = Shape(
    layers=36, hidden_size=4096, inner_size=12288, heads=32, kv_heads=8, head_dim=128, vocab_size=151936, kv_bytes=12 * GIB
)
SHAPES: Final = {
    "tiny": _TINY,
    "tiny-untied": msgspec.structs.replace(_TINY, tied=False),
    "tiny-fp8": msgspec.structs.replace(_TINY, fp8=True),
    "tiny-moe": msgspec.structs.replace(_TINY, inner_size=512, experts=8, experts_per_token=2, tied=False),
    "tiny-draft": msgspec.structs.replace(_TINY, draft="tiny-drafter"),
    "tiny-drafter": msgspec.structs.replace(_TINY, layers=1),
    "tiny-dummy": msgspec.structs.replace(_TINY, dummy=True),
    "1.5b": Shape(
        layers=28, hidden_size=1536, inner_size=8960, heads=12, kv_heads=2, head_dim=128, vocab_size=151936, kv_bytes=8 * GIB
    ),
    "8b": _8B,
    "fp8": msgspec.structs.replace(_8B, fp8=True),
    "30b": Shape(
        layers=58, hidden_size=5120, inner_size=25600, heads=64, kv_heads=8, head_dim=128, vocab_size=151936,
        kv_bytes=16 * GIB, tied=False, dummy=True,
    ),
    "moe": Shape(
        layers=16, hidden_size=2048, inner_size=1024, heads=16, kv_heads=16, head_dim=128, vocab_size=50304,
        kv_bytes=8 * GIB, experts=64, experts_per_token=8, tied=False,
    ),
}  # fmt: skip


def shape_of(name: str) -> Shape:
    """Raises KeyError."""
    return SHAPES[name]
