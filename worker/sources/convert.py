"""Conversion, once: whatever Transformers can load becomes safetensors that an engine maps as they are."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch

from worker.sources.places import made
from worker.sources.report import CantUse, Progress, say

VOCABULARIES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""Files of which a tokenizer is made; without any, Transformers makes an empty one, or asks for other packages."""
KEPT: Final = ("generation_config.json", "chat_template.jinja")


def from_gguf(file: Path, target: Path, dtype: torch.dtype) -> Path:
    """Return `target` with the model of a GGUF file. Takes 20 s for 135 M parameters."""
    if target.exists():
        return target
    return _converted(file.parent, target, dtype, {"gguf_file": file.name}, file.stat().st_size)


def from_directory(directory: Path, target: Path, dtype: torch.dtype) -> Path:
    """Return `target` with the model of a directory whose tensors are of another dtype or named otherwise."""
    if target.exists():
        return target
    if quantised := json.loads((directory / "config.json").read_bytes()).get("quantization_config"):
        kind = quantised.get("quant_method", "an unnamed method")
        raise CantUse("bad_source", f"{directory} is quantised ({kind}): only plain weights, or a GGUF file, can be used")
    if not any((directory / name).exists() for name in VOCABULARIES):
        raise CantUse("bad_source", f"{directory} has no tokenizer: none of {', '.join(VOCABULARIES)} is there")
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return _converted(directory, target, dtype, {"use_safetensors": True}, size)


def _converted(directory: Path, target: Path, dtype: torch.dtype, options: dict[str, Any], size_bytes: int) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 (2 s)

    say(Progress(0, size_bytes))
    load: Any = AutoModelForCausalLM.from_pretrained
    load_tokenizer: Any = AutoTokenizer.from_pretrained
    try:
        model, loading = load(
            directory, dtype=dtype, output_loading_info=True, local_files_only=True, trust_remote_code=False, **options
        )
        say(Progress(size_bytes * 3 // 4, size_bytes))
        options.pop("use_safetensors", None)
        tokenizer = load_tokenizer(directory, local_files_only=True, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CantUse("bad_source", f"Transformers can't load {directory}: {error}") from error
    if absent := sorted(loading.get("missing_keys") or ()):
        raise CantUse("bad_source", f"{len(absent)} weights are missing in {directory}, e.g. {absent[0]}")
    if not tokenizer("a word", add_special_tokens=False)["input_ids"]:
        raise CantUse("bad_source", f"{directory} has a tokenizer without a vocabulary: it makes no tokens of a text")
    with made(target) as draft:
        write(model, draft, dtype)
        tokenizer.save_pretrained(draft)
        for name in KEPT:
            if (directory / name).exists() and not (draft / name).exists():
                shutil.copyfile(directory / name, draft / name)
    say(Progress(size_bytes, size_bytes))
    return target


def write(model: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write configuration and weights; tied ones once, buffers that are computed not at all."""
    from safetensors.torch import save_file  # noqa: PLC0415

    config = model.config.to_dict()
    config.pop("quantization_config", None)  # of the file that it came from; the weights are plain now
    config.pop("_name_or_path", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(config, indent=2, default=str))
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    kept = model.state_dict().keys()
    stored = dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name in kept}
    cast = {name: value.detach().to(dtype if value.is_floating_point() else value.dtype) for name, value in stored.items()}
    save_file({name: value.contiguous() for name, value in cast.items()}, directory / "model.safetensors")
