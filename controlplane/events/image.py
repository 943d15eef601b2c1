"""Events of skeleton images: engines on a node's disk, without weights."""

import msgspec

from controlplane.events.record import Event


class ImageBuilt(Event, frozen=True, kw_only=True):
    """An image was written, restored once, its answer compared, and published."""

    AGGREGATE, KEY = "image", "image"
    node: str
    image: str
    """`img_<16 hex>`: digest of all that it depends on, so what is built again on the same machine has the same id."""
    configuration: str
    size_bytes: int
    """Of the disk."""
    took_ms: int = 0
    proof: str = ""
    """`same_tokens`; empty: found on disk by a worker that started."""
    fingerprint: dict[str, str] = msgspec.field(default_factory=dict)
    zero_bytes: int = 0
    """Of memory besides, all zeros."""


class ImageRefused(Event, frozen=True, kw_only=True):
    """It was not used: something that it depends on is another thing now. Its instances start cold; it is built anew."""

    AGGREGATE, KEY = "image", "image"
    node: str
    image: str
    configuration: str
    code: str
    """`operator`: somebody asked for a new one; else `engine_changed`, `torch_changed`, `python_changed`, `kernel_changed`,
    `libc_changed`, `criu_changed`, `cpu_changed`, `namespaces_changed`, `files_changed`, ..."""
    message: str


class ImageFailed(Event, frozen=True, kw_only=True):
    """It could not be built, or its restores failed: it is not tried again until an operator acts."""

    AGGREGATE, KEY = "image", "image"
    node: str
    image: str
    configuration: str
    step: str
    """`build`, `verify`, `restore` or `check` (its engine came back and answered wrongly)."""
    code: str
    """`dump_failed`, `restore_failed`, `step_deadline`, `check_mismatch`, `image_truncated`, `image_corrupt`,
    `manifest_missing`, `no_space`, ..."""
    message: str


class ImageDismissed(Event, frozen=True, kw_only=True):
    """It was named to leave the disk; the event's actor is who asked."""

    AGGREGATE, KEY = "image", "image"
    node: str
    image: str
    code: str
    """`operator`: this one; `quota`: the node named it as the least valuable when somebody asked for room."""


class ImagePinned(Event, frozen=True, kw_only=True):
    """An operator's word that it stays whatever the quota says, or (`pinned` false) that it may go again."""

    AGGREGATE, KEY = "image", "image"
    node: str
    image: str
    pinned: bool


class ImageRemoved(Event, frozen=True, kw_only=True):
    """It is gone. Its stream goes on: built again on the same machine it has the same id."""

    AGGREGATE, KEY = "image", "image"
    node: str
    image: str
    code: str
    """`operator`, `quota`, `replaced` (by a newer one of its configuration) or `lost` (it was gone when the worker looked)."""
    by: str = ""
    """Who had dismissed it; empty: the node itself."""
