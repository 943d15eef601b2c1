"""What a weight set's directory holds, in a file that is written last: a directory without a sound manifest is a leftover."""

import os
from collections import Counter
from pathlib import Path

import msgspec

from pool.messages import Tensor
from pool.safetensors import SourceFile

NAME = "manifest.json"
VERSION = 1


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A source whose bytes these are; the same files by size and mtime are not read again."""

    path: str
    files: tuple[SourceFile, ...]
    form: str = ""
    """What an engine made of the files, `""`: nothing."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int = VERSION
    weight_set: str
    layout_digest: str
    segments: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    origins: tuple[Origin, ...]
    host_segments: int = 0
    """The last so many segments never go to a device."""
    nodes: tuple[int | None, ...] = ()
    """Memory node that each segment was found on; `()`: there is but one, or the kernel did not tell."""

    @property
    def size_bytes(self) -> int:
        return sum(self.segments)

    @property
    def node_bytes(self) -> dict[int, int]:
        """Memory node -> bytes."""
        found: Counter[int] = Counter()
        for node, size in zip(self.nodes, self.segments, strict=False):
            if node is not None:
                found[node] += size
        return dict(found)


def segment_name(number: int) -> str:
    return f"{number:05d}.segment"


def write(directory: Path, manifest: Manifest, *, durable: bool = True) -> None:
    """Atomic: a reader sees the old one or this one."""
    fresh = directory / (NAME + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        if durable:
            os.fsync(fd)
    fresh.replace(directory / NAME)


def read(directory: Path) -> Manifest | None:
    """None unless the manifest is of this version, belongs to this directory, and every segment has its size."""
    try:
        manifest = msgspec.json.decode((directory / NAME).read_bytes(), type=Manifest)
        sizes = tuple((directory / segment_name(number)).lstat().st_size for number in range(len(manifest.segments)))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    sound = manifest.version == VERSION and manifest.weight_set == directory.name and sizes == manifest.segments
    inside = all(
        0 <= tensor.segment < len(sizes) and 0 <= tensor.offset <= sizes[tensor.segment] - tensor.size_bytes
        for tensor in manifest.tensors
    )
    return manifest if sound and inside else None
