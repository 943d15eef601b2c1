"""Models of the Hugging Face hub, pinned to a commit: fetched once, every weight compared with the hub's digest."""

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, Final

from controlplane.quantities import need_and_limit
from worker.sources.places import fetched, made
from worker.sources.report import CantUse, Progress, say

NAME: Final = re.compile(r"^hf:([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})@([0-9a-f]{40})$")
CONNECT_S: Final = 3.0
WANTED: Final = re.compile(
    r"^(?:[^/]+\.safetensors|model\.safetensors\.index\.json|[^/]*config\.json|tokenizer[^/]*|vocab\.json|merges\.txt"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template\.jinja)$"
)
"""No pickles, no code, no other formats of the same weights."""


def fetch(source: str, models: Path) -> Path:
    """Return the directory of `hf:org/name@commit`.

    Raises:
        CantUse: `bad_source` (no such thing), `hub_unreachable` (not final), `corrupt` (not final).
    """
    named = NAME.match(source)
    if named is None:
        raise CantUse("bad_source", f"{source!r} is not hf:org/name@<40 hex digits>")
    target = models / fetched(source)
    if target.exists():
        return target
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(int(CONNECT_S)))
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import HfApi, hf_hub_download  # noqa: PLC0415 (its settings are read here)
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError  # noqa: PLC0415

    repository, commit = named.groups()
    try:
        about = HfApi().model_info(repository, revision=commit, files_metadata=True, timeout=CONNECT_S)
        files = [one for one in about.siblings or () if WANTED.match(one.rfilename)]
        total, done = sum(one.size or 0 for one in files), 0
        with made(target) as draft:
            for one in files:
                hf_hub_download(repository, one.rfilename, revision=commit, local_dir=draft)
                _verify(draft / one.rfilename, one)
                done += one.size or 0
                say(Progress(done, total))
            shutil.rmtree(draft / ".cache", ignore_errors=True)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise CantUse("bad_source", f"the hub has no {repository} at {commit}: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        raise CantUse("hub_unreachable", f"{repository} can't be fetched from the hub: {error}", final=False) from error
    except Exception as error:  # its HTTP library's own kinds of "no connection"
        if isinstance(error, CantUse):
            raise
        raise CantUse("hub_unreachable", f"the hub does not answer: {error}", final=False) from error
    return target


def _verify(file: Path, expected: Any) -> None:
    size = file.stat().st_size
    if expected.size is not None and size != expected.size:
        has, says = need_and_limit(size, expected.size)
        raise CantUse("corrupt", f"{file.name} has {has}, the hub says {says}", final=False)
    if expected.lfs is not None:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != expected.lfs.sha256:
            raise CantUse("corrupt", f"{file.name} has sha256 {digest}, the hub says {expected.lfs.sha256}", final=False)
