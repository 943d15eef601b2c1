"""Events of nodes and their devices."""

import msgspec

from controlplane.events.record import Event


class NodeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's settings allow, and may change while it runs."""

    image_quota_bytes: int = 0
    """What images may take of its disk; 0: not said, half of what they could."""
    image_pins: tuple[str, ...] = ()
    """Models and configurations whose images stay whatever the quota says."""
    checkpoint_bytes: int | None = None
    """Memory of the host that engines at `checkpoint` may take, all together; None: not said, no limit but the host's own."""


class NodeJoined(Event, frozen=True, kw_only=True):
    """A worker announced itself: the first time, after a restart (new incarnation) or after a change of address."""

    AGGREGATE, KEY = "node", "node"
    node: str
    address: str
    incarnation: str
    boot: str
    """The kernel's boot id: pids mean nothing across a change of it."""
    pool_budget_bytes: int
    version: str = ""
    no_images: str = ""
    """Why engines can't be saved to disk there; empty: they can."""
    image_quota_bytes: int = 0
    """What images may take of the disk; 0: not said."""
    image_pins: tuple[str, ...] = ()
    """Models and configurations whose images its settings pin."""
    no_checkpoint: str = ""
    """Why what an engine has on a GPU can't be taken to the host there; empty: it can."""
    checkpoint_bytes: int | None = None
    """As in `NodeLimits`."""


class NodeLimitsChanged(Event, frozen=True, kw_only=True):
    """Its settings file says other limits than before; they count at once."""

    AGGREGATE, KEY = "node", "node"
    node: str
    before: NodeLimits
    after: NodeLimits


class NodeFellSilent(Event, frozen=True, kw_only=True):
    """No beat for the silence limit. Its grants stay granted: nobody knows what still runs there."""

    AGGREGATE, KEY = "node", "node"
    node: str


class NodeHeardAgain(Event, frozen=True, kw_only=True):
    AGGREGATE, KEY = "node", "node"
    node: str


class NodeLeft(Event, frozen=True, kw_only=True):
    """Its plane was ended in order: no process of an instance is left there, and its pool has gone. It may join again."""

    AGGREGATE, KEY = "node", "node"
    node: str


class DeviceDeclared(Event, frozen=True, kw_only=True):
    """A device is usable, or its size changed."""

    AGGREGATE, KEY = "device", "device"
    node: str
    device: str
    """UUID: the GPU's own, or one kept in the data directory for a declared device."""
    name: str
    kind: str
    """`cpu` (a declared share of host memory) or `gpu`."""
    size_bytes: int
    island: str = ""
    """Devices of a node with the same island reach one another directly (NVLink); empty: nothing is known of it."""


class DeviceWithdrawn(Event, frozen=True, kw_only=True):
    """The device is no longer declared by its node; nothing held a cell of it. (It may be declared again.)"""

    AGGREGATE, KEY = "device", "device"
    node: str
    device: str


class Outsider(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a device that is not this plane's, as the device's driver counts it."""

    pid: int
    size_bytes: int
    name: str = ""
    """Of its program; empty: its node can't say."""


class ForeignMemoryFound(Event, frozen=True, kw_only=True):
    """Processes that are not the plane's have memory of a device. A later one stands for all of an earlier one."""

    AGGREGATE, KEY = "device", "device"
    node: str
    device: str
    processes: tuple[Outsider, ...]


class ForeignMemoryGone(Event, frozen=True, kw_only=True):
    """All that is in use there is the plane's own again, or the driver's."""

    AGGREGATE, KEY = "device", "device"
    node: str
    device: str
