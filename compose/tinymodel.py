"""A tiny model with random weights, of another architecture than SmolLM2's: `python -m compose.tinymodel --target DIR`.

What it says is noise. It is there to be swapped, and is shown as what it is.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker.sources.convert import write
from worker.sources.places import made

END: Final = "<|end|>"
START: Final = "<|start|>"
TEMPLATE: Final = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SIZES: Final = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip


def tokenizer(directory: Path) -> int:
    """Write a byte-level tokenizer whose tokens are the 256 bytes and two marks; return its size."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made_of: Any = models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    whole = Tokenizer(made_of)
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([START, END])
    whole.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": START, "eos_token": END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return len(letters) + 2


def tiny(target: Path) -> None:
    """Write the model to `target`. The weights follow from a fixed seed."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 (2 s)

    with made(target) as draft:
        size = tokenizer(draft)
        for_model: Any = AutoConfig.for_model
        config = for_model("qwen3", vocab_size=size, bos_token_id=size - 2, eos_token_id=size - 1, **SIZES)
        torch.manual_seed(0)
        from_config: Any = AutoModelForCausalLM.from_config
        write(from_config(config, dtype=torch.float32), draft, torch.float32)


def main() -> int:
    parser = argparse.ArgumentParser(prog="compose.tinymodel")
    parser.add_argument("--target", type=Path, required=True)
    tiny(parser.parse_args().target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
