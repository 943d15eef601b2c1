"""What makes a source this source: what is known of it counts for as long as that is the same."""

from pathlib import Path
from typing import Final

from controlplane.spec import ModelSpec

PRIVATE: Final = "/dev/shm"  # noqa: S108 (looked at only)
"""Engines live in a mount namespace where this is empty."""


class SourceRefused(Exception):
    """The source can't be used. `final`: trying again will not help. Codes: `bad_source`, `cannot_fit`, `hub_unreachable`,
    `corrupt`, `opening_failed`, `engine_missing`."""

    def __init__(self, code: str, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.code, self.message, self.final = code, message, final


def identity(source: str) -> tuple[str, ...]:
    """Return what makes this source this source: a pinned name, or path, size and time of its files. Raises SourceRefused."""
    if source.startswith("hf:"):
        return (source,)
    path = Path(source)
    if not path.is_absolute():
        raise SourceRefused("bad_source", f"{source!r} is neither hf:org/name@<40 hex>, an absolute path, nor fake:name")
    try:
        found = path.resolve(strict=True)
        if found.is_relative_to(PRIVATE):
            raise SourceRefused(
                "bad_source", f"{source} lies in {PRIVATE}, and engines have one of their own: put it elsewhere"
            )
        files = [found] if found.is_file() and source.endswith(".gguf") else sorted(found.iterdir())
        if found.is_dir() and not (found / "config.json").exists():  # before a process with torch is started to find it out
            raise SourceRefused("bad_source", f"{source} holds no model: it has no config.json", final=False)
        for file in files:
            if file.is_symlink() and file.resolve(strict=True).parent != found:
                raise SourceRefused(
                    "bad_source", f"{file} is a link that leads out of its directory: copy or hard-link the file"
                )
        marks = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files if file.is_file()]
    except OSError as error:
        raise SourceRefused("bad_source", f"{source}: {error.strerror or error}", final=False) from error
    return (str(found), *marks)


def identity_of_draft(spec: ModelSpec) -> tuple[str, ...]:
    """As `identity`; empty without such a model. Raises SourceRefused."""
    if (draft := spec.arguments.get("draft_model")) is None:
        return ()
    try:
        return identity(str(draft))
    except SourceRefused as refused:
        raise SourceRefused(refused.code, f"draft_model: {refused.message}", final=refused.final) from refused
