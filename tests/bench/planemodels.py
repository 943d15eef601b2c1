"""Models for a bench of a whole plane, what they are asked, and what a fresh vLLM answers."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOKENS = 24
PROMPTS = 6
"""Different ones of each model; answers come round again after swaps."""


def made(work: Path, shape: str, name: str, seed: int) -> Path:
    """A checkpoint with random weights and a tokenizer that loses nothing: an answer's text tells its ids."""
    directory = work / name
    argv = [sys.executable, "-P", "-m", "compose.bench.checkpoints", str(directory), shape, str(seed)]
    subprocess.run(argv, check=True)  # not in this process: it would stay on the device, a stranger to the plane
    config = json.loads((directory / "config.json").read_text())
    end = int(config["vocab_size"]) - 1
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": end}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    wide_tokenizer(directory, end)
    return directory


def made_together(work: Path, wanted: dict[str, tuple[str, int]]) -> dict[str, Path]:
    """Several, by name: shape and seed. Most of the time that one takes is its process's start."""
    with ThreadPoolExecutor() as threads:
        made_ones = threads.map(lambda one: made(work, one[1][0], one[0], one[1][1]), wanted.items())
        return dict(zip(wanted, made_ones, strict=True))


def wide_tokenizer(directory: Path, end: int) -> None:
    """Ids 0 to 255 are bytes, what is above is a word of its own that no text becomes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"Ġ{number}": number for number in range(len(letters), end)} | {"<|end|>": end}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))


def prompts_of(model: str) -> list[str]:
    return [f"{model} was asked, for the {number}th time, what follows from {number * 37}: " for number in range(PROMPTS)]


def settings(sources: dict[str, Path], shares: dict[str, str], arguments: dict[str, Any], pool_bytes: str) -> str:
    inline = ", ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    tables = [
        f'[[model]]\nname = "{name}"\nsource = "{source}"\nengine = "vllm"\nshare = "{shares[name]}"\n'
        f'idle = {{ sleep = "never", cold = "never" }}\narguments = {{ {inline} }}\n'
        for name, source in sources.items()
    ]
    return f'[node]\npool_bytes = "{pool_bytes}"\n\n' + "\n".join(tables)


def fresh(sources: dict[str, Path], work: Path, arguments: dict[str, Any], *, deadline_s: float) -> dict[str, list[str]]:
    """Answers of a fresh vLLM of each model, all at once on one GPU."""
    from tokenizers import Tokenizer

    running = {}
    for name, source in sources.items():
        tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
        prompts = work / f"{name}.prompts.json"
        prompts.write_text(json.dumps([tokenizer.encode(text).ids for text in prompts_of(name)]))
        argv = [sys.executable, "-m", "tests.bench.freshanswers", str(source), str(prompts), str(work / f"{name}.json")]
        log = (work / f"{name}.fresh.log").open("wb")
        running[name] = subprocess.Popen([*argv, json.dumps(arguments), str(TOKENS)], stdout=log, stderr=log)
    answers = {}
    for name, process in running.items():
        if process.wait(deadline_s):
            raise SystemExit(f"{name}: {(work / f'{name}.fresh.log').read_text()[-2000:]}")
        tokenizer = Tokenizer.from_file(str(sources[name] / "tokenizer.json"))
        ids = json.loads((work / f"{name}.json").read_text())
        answers[name] = [str(tokenizer.decode(one, skip_special_tokens=True)) for one in ids]
    return answers


def played(work: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Tiny models and the environment of a machine with a GPU that is played."""
    from tests.standin.install import install
    from tests.tinymodels import tiny

    kinds = {"a": ("llama", 1), "b": ("llama", 2), "small": ("qwen3", 3)}
    sources = {name: work / name for name in kinds}
    for name, (kind, seed) in kinds.items():
        if not sources[name].exists():
            tiny(sources[name], kind, seed)
    return sources, install(work / f"machine-{os.getpid()}", {"GPU-00000000-0000-0000-0000-000000000001": 128 << 20})
