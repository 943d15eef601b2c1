"""What a ladder is climbed with: a checkpoint of a shape, and the settings of a plane that serves it alone."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from compose.bench.scene import SMALL
from compose.bench.shapes import SHAPES
from compose.refusal import EnvironmentRefusal
from worker import gpus

FAKE: Final = "fake"
_MIB: Final = 1 << 20
_GPU: Final = {"max_num_seqs": 256, "max_model_len": 4096}
_CPU: Final = {"max_num_seqs": 2, "max_model_len": 512}
_FAKE: Final = {"weight_bytes": 16 * _MIB, "kv_bytes": 16 * _MIB, "skeleton_bytes": 16 * _MIB}


class Source(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    engine: str
    source: str
    bytes: int
    arguments: dict[str, Any]

    def settings(self, model: str) -> str:
        """Of a plane with that one model on one device; nothing descends by itself. JSON's values are TOML's, too."""
        arguments = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.arguments.items())
        device = f'devices = [{{ name = "cpu0", bytes = {2 * self.bytes + (1 << 30)} }}]\n' if self.engine != "vllm" else ""
        return (
            f"[node]\npool_bytes = {self.bytes + self.bytes // 4 + 256 * _MIB}\n{device}\n"
            f'[[model]]\nname = "{model}"\nsource = {json.dumps(self.source)}\nengine = "{self.engine}"\nshare = 1\n'
            f'idle = {{ sleep = "never", cold = "never" }}\narguments = {{ {arguments} }}\n'
        )


def source_of(shape: str, work: Path, arguments: dict[str, Any]) -> Source:
    """Make the checkpoint in `work` unless it is there. Raises EnvironmentRefusal or click.BadParameter."""
    if shape == FAKE:
        return Source(name=FAKE, engine=FAKE, source="fake:measured", bytes=16 * _MIB, arguments=_FAKE | arguments)
    engine = "vllm" if gpus.visible(os.environ.get("CUDA_VISIBLE_DEVICES")) and shape != SMALL else "transformers"
    given: dict[str, Any] = dict(_GPU if engine == "vllm" else _CPU)
    if (Path(shape) / "config.json").is_file():
        made = Path(shape).resolve()
        given = {"max_num_seqs": 2} if engine == "transformers" else given
    elif shape == SMALL:
        made = _small(work)
    elif shape in SHAPES:
        if engine == "vllm":
            given["kv_bytes"] = SHAPES[shape].kv_bytes
        made = _random(work, shape)
    else:
        raise click.BadParameter(f"{shape!r} is neither a directory with a config.json nor one of {', '.join(SHAPES)}.")
    size = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    return Source(name=shape, engine=engine, source=str(made), bytes=size, arguments=given | arguments)


def _small(work: Path) -> Path:
    from compose.demo import DemoFailed, small  # noqa: PLC0415 - only for this shape

    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (work / SMALL).exists():
        try:
            asyncio.run(small(work, lambda line: print(line, file=sys.stderr)))
        except DemoFailed as failed:
            raise EnvironmentRefusal("no_model", str(failed), "Give the directory of a checkpoint: --shape DIR.") from failed
    return work / SMALL


def _random(work: Path, shape: str) -> Path:
    place = work / f"{shape}-a"
    made = subprocess.run([sys.executable, "-P", "-m", "compose.bench.checkpoints", str(place), shape, "1"], check=False)
    if made.returncode:
        raise EnvironmentRefusal("no_checkpoint", f"No checkpoint of shape {shape} could be made.", "See above why.")
    if not (place / "tokenizer.json").exists():
        _tokenizer(place, SHAPES[shape].vocab_size)
    return place


def _tokenizer(place: Path, size: int) -> None:
    """A byte-level one in which every other id is a word of its own, so that texts differ where ids do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - only where there are engines

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"<{number}>" for number in range(len(letters), size))]
    made: Any = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(place / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<300>", "eos_token": "<301>"}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
