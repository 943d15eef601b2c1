"""What an image says of itself, `manifest.json`, and whether its files are still as it says."""

from pathlib import Path
from typing import Final

import msgspec

from controlplane.quantities import need_and_limit
from worker.filedigest import data_bytes, digest
from worker.images.fingerprint import Fingerprint, MappedFile

MANIFEST: Final = "manifest.json"


class ImageBroken(Exception):
    """An image that must not be used.

    `code`: `manifest_missing`, `manifest_broken`, `image_truncated`, `image_corrupt`, `image_unreadable`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class File(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    """Of the file as it is read, holes included."""
    digest: str
    """blake3, hex."""
    data_bytes: int | None = None
    """Without its holes; None: made when they were not looked for."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`."""

    image: str
    fingerprint: Fingerprint
    mapped: tuple[MappedFile, ...]
    files: tuple[File, ...]
    gpu: str | None = None
    """UUID of the GPU that the engine was taken off before (empty: it only pretended to hold one); None: it held none."""
    pid: int
    """The engine's, in the pid namespace of its holder."""
    place: str
    """Where it waits for its release."""
    skeleton_bytes: int
    made_ms: int
    proof: str
    """What was compared when it was made: `same_tokens`."""
    took_ms: int = 0
    zero_bytes: int = 0
    """Of memory that is all zeros, and is on no disk."""

    @property
    def size_bytes(self) -> int:
        """What it takes of a disk: no hole of a file counts (`bulk.py` leaves some)."""
        return sum(file.size_bytes if file.data_bytes is None else file.data_bytes for file in self.files)

    @property
    def memory_bytes(self) -> int:
        """What it takes of memory once it is restored."""
        return self.size_bytes + self.zero_bytes


def read(directory: Path) -> Manifest:
    """That of the image in `directory`. Raises ImageBroken (`manifest_missing`, `manifest_broken`, `image_unreadable`)."""
    image = directory.name
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise ImageBroken("manifest_missing", f"{image} has no manifest: it was not finished") from None
    except OSError as error:
        raise ImageBroken("image_unreadable", f"the manifest of {image} can't be read: {error}") from error
    except msgspec.MsgspecError as error:
        raise ImageBroken("manifest_broken", f"the manifest of {image} can't be read: {error}") from None
    if manifest.image != image:
        raise ImageBroken("manifest_broken", f"the manifest of {image} is that of {manifest.image[:100]}")
    return manifest


def described(path: Path) -> File:
    """A file as a manifest has it. Raises OSError."""
    return File(path.name, path.stat().st_size, digest(path), data_bytes(path))


def is_memory(name: str) -> bool:
    """Whether a file of an image holds nothing but an engine's memory; CRIU, and `refill`, go by what is in the others."""
    return name.endswith(".img") and name.startswith(("pages-", "bulk-"))


def verify(directory: Path, manifest: Manifest, *, memory: bool | None = None) -> None:
    """Compare every file with its digest (about 1 GB/s and processor); `memory`: only those of an engine's memory, or only
    the others. Sizes are compared of all.

    Raises ImageBroken (`image_truncated`, `image_corrupt`, `image_unreadable`).
    """
    for file in manifest.files:  # of a file that is too short CRIU may wait for the rest
        try:
            size = (directory / file.name).stat().st_size
        except FileNotFoundError:  # now, or while it is being removed
            raise ImageBroken("image_truncated", f"{file.name} of {manifest.image} is not there") from None
        except OSError as error:
            raise ImageBroken("image_unreadable", f"{file.name} of {manifest.image} can't be looked at: {error}") from error
        if size != file.size_bytes:
            has, had = need_and_limit(size, file.size_bytes)
            raise ImageBroken("image_truncated", f"{file.name} of {manifest.image} has {has}, not {had}")
    for file in manifest.files:
        if memory is not None and is_memory(file.name) is not memory:
            continue
        try:
            found = digest(directory / file.name)
        except OSError as error:  # the disk fails, or it is being removed
            raise ImageBroken("image_unreadable", f"{file.name} of {manifest.image} can't be read: {error}") from error
        if found != file.digest:
            raise ImageBroken("image_corrupt", f"{file.name} of {manifest.image} is not what was written")
