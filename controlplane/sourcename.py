"""What names a model's files: a pinned model of a hub, or an absolute path on the node that opens it."""

import re
from pathlib import PurePosixPath
from typing import Final

_HUB: Final = re.compile(r"hf:[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*@[0-9a-f]{40}", re.ASCII)
LIMIT: Final = 4096


def is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= LIMIT


def files(value: str) -> str:
    """Return the name, normalised. Raises ValueError with the reason; whether anything is there is for a node to say."""
    if not is_text(value):
        raise ValueError(f"must be a text of printable characters, at most {LIMIT}")
    if value.startswith("hf:"):
        if not _HUB.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a pinned Hugging Face source; write hf:ORG/NAME@COMMIT, the commit in 40 hexadecimal "
                "digits, so that the weights can't change unseen"
            )
        return value
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{value!r} is neither hf:ORG/NAME@COMMIT nor an absolute path without '..'")
    return str(path)
