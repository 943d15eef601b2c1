"""What an image depends on. Pure: the facts of now are compared with those of the day it was made, before CRIU starts.

Weights, limits and names are no part of it: any model of the configuration can be mapped into the skeleton.
"""

from typing import Final

import msgspec
from blake3 import blake3

REASONS: Final = {
    "configuration": "configuration_changed", "engine": "engine_changed", "python": "python_changed",
    "torch": "torch_changed", "kernel": "kernel_changed", "libc": "libc_changed", "criu": "criu_changed",
    "cpu": "cpu_changed", "driver": "driver_changed", "cuda": "cuda_changed", "gpu": "gpu_changed",
    "namespaces": "namespaces_changed", "node": "node_changed",
}  # fmt: skip
"""Field -> the stable reason of a refusal, in the order in which they are looked at."""
OF_START: Final = frozenset(REASONS) - {"configuration", "criu", "node"}
"""Fields that an engine has from its start, whoever writes it to disk later, and with what."""
FILES_CHANGED: Final = "files_changed"


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The facts, as texts that are compared for equality."""

    configuration: str
    """Engine, architecture and the arguments that shape the skeleton, as one digest."""
    engine: str
    """The engine's name, its libraries' versions, and a digest of our own code in its process and for its memory."""
    python: str
    torch: str
    """Empty for an engine without it."""
    kernel: str
    libc: str
    criu: str
    cpu: str
    """Model name and flags."""
    driver: str = ""
    """Of the GPU; empty for an engine without one, as the next two."""
    cuda: str = ""
    gpu: str = ""
    """Its model, and how many this machine has: a checkpoint comes back to one of the same kind, among as many."""
    namespaces: str
    """`apart` or `shared`: an image made with namespaces has its pids in them."""
    node: str

    @property
    def image(self) -> str:
        """The image's id: the same facts always give the same one."""
        text = msgspec.json.encode(self, order="sorted")
        return f"img_{blake3(text).hexdigest(length=8)}"


class MappedFile(msgspec.Struct, frozen=True):
    """A file that the engine had mapped. `mark`: its build-id, else empty."""

    path: str
    size_bytes: int
    mark: str = ""


class Refusal(msgspec.Struct, frozen=True):
    """Why an image is not used. `code` is stable; `was` and `now` are what differs."""

    code: str
    was: str = ""
    now: str = ""

    def __str__(self) -> str:
        return f"{self.code}: it was {self.was!r} when the image was made, and is {self.now!r} now" if self.was else self.code


def difference(made: Fingerprint, now: Fingerprint) -> Refusal | None:
    """The first fact that differs; None: the image fits."""
    for field, code in REASONS.items():
        was, is_ = getattr(made, field), getattr(now, field)
        if was != is_:
            return Refusal(code, str(was), str(is_))
    return None


def outdated(started: Fingerprint | None, now: Fingerprint) -> str:
    """Why an image of an engine would not be what its fingerprint says, as a sentence; empty: it would be.

    Args:
        started: what the engine was started with; None: whoever started it did not write that down. now: of one that would be
            started now.
    """
    if started is None:
        return "the engine was started by a version that did not write down with what"
    for field in REASONS:
        was, is_ = getattr(started, field), getattr(now, field)
        if field in OF_START and was != is_:
            return f"the engine was started by another version ({field} {was!r}, and {is_!r} now)"
    return ""


def changed_file(made: tuple[MappedFile, ...], now: tuple[MappedFile | None, ...]) -> Refusal | None:
    """The first mapped file that is another one today, or gone (None); both in one order."""
    for old, new in zip(made, now, strict=True):
        if old != new:
            described = f"{new.size_bytes} bytes, build-id {new.mark or 'none'}" if new else "gone"
            return Refusal(FILES_CHANGED, f"{old.path}: {old.size_bytes} bytes, build-id {old.mark or 'none'}", described)
    return None
