"""The state's records of where instances can be: nodes, their devices, and who holds which cells of them."""

import msgspec

from controlplane.events.node import NodeLimits, Outsider


class Node(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    address: str
    incarnation: str
    boot: str
    pool_budget_bytes: int
    heard: bool = True
    version: str = ""
    no_images: str = ""
    """Why engines can't be saved to disk there; empty: they can."""
    image_quota_bytes: int = 0
    """What images may take of its disk; 0: not said."""
    image_pins: tuple[str, ...] = ()
    """Models and configurations whose images its settings pin."""
    no_checkpoint: str = ""
    """Why what an engine has on a GPU can't be taken to the host there; empty: it can."""
    checkpoint_bytes: int | None = None
    """Memory of the host that engines at `checkpoint` may take, all together; None: not said."""

    @property
    def limits(self) -> NodeLimits:
        return NodeLimits(
            image_quota_bytes=self.image_quota_bytes, image_pins=self.image_pins, checkpoint_bytes=self.checkpoint_bytes
        )


class Device(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    node: str
    name: str
    kind: str
    size_bytes: int
    island: str = ""
    """Devices of a node with the same island reach one another directly."""
    foreign: tuple[Outsider, ...] = ()
    """Processes of others that have memory of it, the largest first."""

    @property
    def foreign_bytes(self) -> int:
        return sum(one.size_bytes for one in self.foreign)

    @property
    def usable_bytes(self) -> int:
        """What others leave of it."""
        return max(0, self.size_bytes - self.foreign_bytes)


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    """Its event's position; the fencing token."""
    node: str
    device: str
    instance: str
    offset: int
    cells: int
    since_ms: int
    gang: int = 0
    """Number of the grant of the gang's first rank; 0: this is it, or there is no gang."""
    rank: int = 0
