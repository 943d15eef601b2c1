"""The model that drafts for another: looked at beside it, and kept as a copy named by its content.

An engine reads it at its start and again with each sibling's weights, and nothing but its path would say which it was. So
engines are told a copy that nobody changes: other content is another directory, another configuration, another skeleton.
"""

import shutil
from pathlib import Path
from typing import Final

from blake3 import blake3
from tokenizers import Tokenizer

from pool.safetensors import INDEX
from worker.filedigest import digest
from worker.sources.copies import PREFIX
from worker.sources.headers import Headers, headers
from worker.sources.hub import fetch
from worker.sources.places import made
from worker.sources.report import CantUse

_BESIDE: Final = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "hf_quant_config.json",
    "quantize_config.json", "quant_config.json", INDEX,
)  # fmt: skip
"""Files beside the weights that a copy has if they are there."""


def draft_for(target: Headers, source: str, models: Path) -> Headers:
    """Return what the kept copy of `source` says, checked against the model that it drafts for.

    Raises:
        CantUse: its message begins with `draft_model`.
    """
    try:
        directory = fetch(source, models) if source.startswith("hf:") else Path(source).resolve(strict=True)
        found = headers(directory)
        _same_vocabulary(target, found)
        return headers(_kept(found, models))
    except CantUse as refused:
        raise CantUse(refused.code, f"draft_model: {refused.message}", final=refused.final) from refused
    except OSError as error:
        where = error.filename or source
        raise CantUse("bad_source", f"draft_model: {where}: {error.strerror or error}", final=False) from error


def _same_vocabulary(target: Headers, draft: Headers) -> None:
    """Ids go from one to the other as they are."""
    has, wanted = (int(getattr(one.text, "vocab_size", None) or 0) for one in (draft, target))
    if has != wanted:
        raise CantUse(
            "bad_source",
            f"{draft.directory} has a vocabulary of {has} tokens, the model it drafts for {wanted}: take one with the same",
        )
    ours, theirs = (_tokens(one.directory) for one in (target, draft))
    if ours != theirs:
        differing = sum(theirs.get(token) != number for token, number in ours.items())
        differing += sum(token not in ours for token in theirs)
        raise CantUse(
            "bad_source",
            f"{draft.directory} has another vocabulary than the model it drafts for: {differing} tokens of "
            f"{len(ours)} differ; take one with the same tokenizer",
        )


def _tokens(directory: Path) -> dict[str, int]:
    file = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # its library raises no other kind
        raise CantUse("bad_source", f"{file}: {error}") from error


def _kept(found: Headers, models: Path) -> Path:
    names = sorted({*(one.name for one in found.weights.files), *_present(found.directory)})
    content = _digest(found.directory, names)
    target = models.resolve() / f"{PREFIX}{content}"
    if target.exists():
        return target
    with made(target) as copy:
        for name in names:
            shutil.copyfile(found.directory / name, copy / name)
        if _digest(copy, names) != content:
            raise CantUse("bad_source", f"{found.directory} changed while it was read: it is tried again", final=False)
    return target


def _present(directory: Path) -> list[str]:
    return [name for name in _BESIDE if (directory / name).is_file()]


def _digest(directory: Path, names: list[str]) -> str:
    """Of all bytes, 32 hex digits."""
    whole = blake3()
    for name in names:
        whole.update(f"{name}\0{digest(directory / name)}".encode())
    return whole.hexdigest(length=16)
