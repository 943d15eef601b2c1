"""What the process that opens a source says to the worker: JSON, a line each, on its standard output."""

import msgspec


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Bytes done of bytes in all (0: unknown)."""

    done_bytes: int
    total_bytes: int


class Inspected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last line when all went well."""

    source_dir: str
    """The source itself where an engine can map it as it is, else the converted one."""
    architecture: str
    skeleton: str
    """Digest of the architecture's configuration, names and paths left out."""
    parameters: int
    weight_bytes: int
    kv_bytes: int
    context_tokens: int
    max_num_seqs: int
    draft_dir: str = ""
    """The kept copy of the model that drafts for it, named by its content; empty: there is none."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last line when it did not."""

    code: str
    message: str
    final: bool = True
    """Trying again will not help."""


Line = Progress | Inspected | Refused


class CantUse(Exception):
    """Raised within that process; becomes its `Refused`."""

    def __init__(self, code: str, message: str, *, final: bool = True) -> None:
        super().__init__(message)
        self.code, self.message, self.final = code, message, final


def say(line: Line) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)  # noqa: T201 (this is the wire)
