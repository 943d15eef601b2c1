"""The pool daemon's wire: a unix socket, 4-byte little-endian lengths and msgpack; descriptors travel by SCM_RIGHTS.

While the daemon works on a `Stage` or `Verify` it says so at least every second; closing the connection cancels.

One connection carries one conversation at a time. A connection that holds an `Attached` set is its reference:
closing it (or dying) gives the reference back.
"""

import msgspec

from pool.blocks import Groups, alone
from pool.described import Described


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring a directory of safetensors files into the pool. Answers: `Staging` any number of times, then `Staged` or `Refusal`.

    A source that is staged already (same path, size and mtime of each file) is answered at once.
    """

    source: str
    """Absolute directory."""


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer: `Attached`, followed by one message per 100 descriptors (segments in order, on a device blocks), or `Refusal`.

    With a device the descriptors of all but the set's host segments are memory of that GPU, sent while it is still being
    filled (mapping needs no bytes), and `Filled` follows once it is, or a `Refusal`, after which nothing is to be used.
    """

    weight_set: str
    device: str | None = None
    """UUID of a GPU of this node."""
    over: str | None = None
    """A set of the same layout that this connection holds on the device: its memory shall take the new set's bytes where it is.

    Then `Attached.in_place` is set and descriptors come of host segments alone. A `Refusal` (`not_in_place`: others have that
    memory, or the set is there already; `unknown_set`; `corrupt`) instead of `Attached` has changed nothing.
    """
    beside: tuple[str, ...] = ()
    """UUIDs of devices that are filled for the same engine at the same time, a gang's: their links are not asked for help."""
    neighbours: Groups | None = None
    """Segments that lie side by side where they will be mapped, by number and in order: one descriptor may cover several of
    them. Empty: this connection maps nothing, or whatever `Attached.blocks` says. None: it was built before there were blocks,
    and expects one descriptor a segment, in order."""
    left_on: str | None = None
    """UUID: this process maps the set there, in memory of a daemon before this one: counted, and handed out to nobody."""
    left: dict[str, int] = {}
    """With `left_on`: `Attached.copies` of then. Empty: that daemon was built before there were any."""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give one reference of this connection back, after unmapping. Answer: `Released`, once the memory is free."""

    weight_set: str
    device: str | None = None


class Deposit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make room for a set in an engine's own layout.

    Answer: `Room` and writable descriptors of all segments. Write the tensors, leave the rest as it is (zero), send `Seal`.
    """

    source: str
    """Absolute directory of the files that the engine has loaded."""
    form: str
    """What the engine makes of the files: one source has one set per form (a configuration's id)."""
    device: str | None = None
    """UUID of the GPU that the engine is on: the set comes to lie on its memory node."""
    segments: tuple[int, ...]
    host_segments: int
    """The last so many are never on a device: engines copy the tensors in them into memory of their own."""
    tensors: tuple["Tensor", ...]
    """Their digests are left out: the daemon computes them."""


class Written(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first so many tensors of a deposit are there: digests need not wait for the rest. No answer."""

    tensors: int


class Seal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All is written. Answer: `Staging` any number of times (digests), then `Staged`."""


class Find(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Is there a set of exactly these files in this form? Answer: `Staged` (`read_bytes` 0) or `Refusal` (`unknown_set`)."""

    source: str
    form: str


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Forget a set and free its memory. Answer: `Described`, after it; `in_use` while somebody maps it."""

    weight_set: str


class Verify(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compare every tensor with its digest. Answer: `Staging` any number of times, then `Verified`.

    A set that fails is dropped, at the latest when nobody maps it any more; meanwhile nobody else gets it.
    """

    weight_set: str


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer: `Described`."""


class Staging(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    done_bytes: int
    total_bytes: int


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    weight_set: str
    """`ws_<32 hex>`: digest over the tensors' digests and the layout."""
    size_bytes: int
    took_ms: int
    read_bytes: int
    """0: it was there already."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    dtype: str
    """As in safetensors: F32, BF16, ..."""
    shape: tuple[int, ...]
    segment: int
    offset: int
    size_bytes: int
    digest: str = ""
    """blake3 of the bytes, hex."""


class Attached(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    weight_set: str
    segments: tuple[int, ...]
    """Size of each in bytes, a multiple of the page size."""
    tensors: tuple[Tensor, ...]
    host_segments: int = 0
    """The last so many segments are host memory also where a device was named."""
    device: str | None = None
    in_place: bool = False
    """The device's memory is what was mapped before: not to be read until `Filled`."""
    blocks: Groups = ()
    """On a device: the segments that each descriptor covers, side by side in this order. Empty: one a segment."""
    copies: dict[str, int] = {}
    """On a device: the copies of the set there that the descriptors are of, each with a name that no other ever has, and bytes
    of each. A set may be there more than once."""

    @property
    def covered(self) -> Groups:
        """The same, said also where a daemon did not: one that was built before there were blocks makes one a segment."""
        return self.blocks or alone(len(self.segments) - self.host_segments)

    @property
    def descriptors(self) -> int:
        """How many follow."""
        if self.in_place:
            return self.host_segments
        return len(self.covered) + self.host_segments


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """What went over one link."""

    via: str
    """UUID of the GPU whose link it was."""
    copied_bytes: int
    took_ms: float


class Filled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The device's memory holds the set."""

    copied_bytes: int
    """0: it was there already, for somebody else."""
    took_ms: float
    """From the request's turn on the device to the last byte."""
    bytes_per_s: float
    path: str
    """How the bytes went: `resident`, `host` (its own link), or `links` (other GPUs' links, too)."""
    shards: tuple[Shard, ...] = ()
    """Its own link first."""
    made_ms: float = 0.0
    """Of `took_ms`, until all memory was made and exported; bytes travel meanwhile. 0: it was there."""
    made_ahead: int = 0
    """Blocks that were made before the first byte left."""
    longest_ms: float = 0.0
    """What the driver took for the one block that it took longest to make: a millisecond, unless something else holds it up."""


class Released(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    freed_bytes: int
    """What nobody else has; 0: others have all of it."""
    took_ms: float


class Room(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Writable descriptors follow, one a segment."""


class Verified(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    weight_set: str
    bad: tuple[str, ...]
    """Names of tensors whose bytes do not match."""


PLACE_LOST = "place_lost"


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Codes: `over_budget` (need_bytes, free_bytes), `no_room` (the host has less than the budget), `unknown_set`, `in_use`,
    `bad_source`, `corrupt`, `forbidden` (another user), `failed` (the daemon's own fault, or its disk's), `unknown_device`,
    `device_full` (need_bytes, free_bytes: seen before a byte is copied), `device_silent`, `bad_layout`, `not_in_place`,
    `place_lost` (this daemon ends and another one comes: clients take it for its death)."""

    code: str
    message: str
    need_bytes: int = 0
    free_bytes: int = 0


Request = Stage | Attach | Release | Deposit | Written | Seal | Find | Drop | Verify | Describe
Reply = Staging | Staged | Attached | Filled | Released | Room | Verified | Described | Refusal
