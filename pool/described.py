"""What the pool daemon says of itself, its sets and its devices: the answer to `Describe`."""

import msgspec

from pool.numa import MemoryNode
from pool.pace import BESIDE_DECODING


class SetState(msgspec.Struct, frozen=True, kw_only=True):
    weight_set: str
    size_bytes: int
    mapped_by: int
    """Connections that hold it."""
    source: str
    """The first one that had these bytes."""
    bad: tuple[str, ...] = ()
    """Tensors that were found corrupt: it goes when its last holder goes."""
    node_bytes: dict[int, int] = {}
    """Memory node -> bytes of it; empty: there is but one node, or the kernel does not tell."""


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A set that was found corrupt. Its sources can be staged again."""

    weight_set: str
    bad: tuple[str, ...]


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    total_bytes: int
    free_bytes: int
    """By the driver's word, whoever uses the rest."""
    sets: dict[str, int]
    """Weight set -> references."""
    resident_bytes: int
    registered_bytes: int
    """Host memory that copies run from at full speed."""
    left_bytes: int = 0
    """Of sets that a daemon before this one put there: they live as long as the engines that map them."""


class Described(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    budget_bytes: int
    used_bytes: int
    pid: int
    sets: tuple[SetState, ...]
    dropped: tuple[Dropped, ...] = ()
    """Since the daemon's start, the last 100."""
    devices: tuple[DeviceState, ...] = ()
    ready_bytes: int = 0
    """Memory without a set that the host has given already: it makes room whenever a set needs it."""
    nodes: tuple[MemoryNode, ...] = ()
    placement: str = ""
    """`one node`, `placed`, or `not placed: ` and why."""
    ready_limit_bytes: int = 0
    """What it may come to."""
    helpers: bool = True
    """Whether a device may be filled over the links of others, too, where there are any."""
    beside_decoding: float = BESIDE_DECODING
    """Of a link's rate that a copy takes while another engine decodes on its device; 1: all of it."""
