"""Tiny models with random weights, written as any other source is: config, safetensors, tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "tie_word_embeddings": True,
    },
    "qwen3": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}  # fmt: skip


def tiny(directory: Path, kind: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """Write a model of architecture `kind`; another seed gives other weights of the same architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 (3 s)

    config = AutoConfig.for_model(kind, bos_token_id=256, eos_token_id=256, **{"vocab_size": 257, **SIZES[kind], **sizes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # spread out, so that the likeliest token leads by more than rounding
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    directory.mkdir(parents=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    save_file({name: value.contiguous() for name, value in model.named_parameters()}, directory / "model.safetensors")
    byte_tokenizer(directory)
    return directory


def byte_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes and one end-of-text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {"<|end|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
