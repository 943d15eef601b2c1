"""Commands of node workers: their hello and their reports. A repeated or stale report changes nothing."""

import msgspec

from controlplane.events.instance import Step
from controlplane.events.node import Outsider
from controlplane.rungs import Rung
from controlplane.spec import Argument, ModelFacts


class DeviceFound(msgspec.Struct, frozen=True):
    device: str
    name: str
    kind: str
    size_bytes: int
    island: str = ""
    """As in `DeviceDeclared`."""


class InstanceFound(msgspec.Struct, frozen=True):
    """An instance that a worker found alive when it started (adopted), as it really is."""

    instance: str
    rung: Rung
    model: str | None
    grant: int | None


class ImageFound(msgspec.Struct, frozen=True):
    """An image on the node's disk when its worker started."""

    image: str
    configuration: str
    size_bytes: int
    usable: bool = True
    """False: something that it depends on has changed."""
    zero_bytes: int = 0
    """Of memory that is all zeros, and is on no disk."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker starts (new incarnation) or reconnects (same one).

    Instances that the plane knows on this node and that are not in `instances` are gone; weight sets likewise.
    """

    node: str
    address: str
    incarnation: str
    boot: str
    pool_budget_bytes: int
    devices: tuple[DeviceFound, ...]
    instances: tuple[InstanceFound, ...] = ()
    weight_sets: tuple[str, ...] = ()
    images: tuple[ImageFound, ...] = ()
    no_images: str = ""
    """Why engines can't be saved to disk here; empty: they can."""
    image_quota_bytes: int = 0
    """What images may take of the disk; 0: not said."""
    image_pins: tuple[str, ...] = ()
    """Models and configurations whose images the settings pin."""
    no_checkpoint: str = ""
    """Why what an engine has on a GPU can't be taken to the host here; empty: it can."""
    checkpoint_bytes: int | None = None
    """As in `NodeLimits`."""
    version: str = ""


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The plane on this node was ended in order. Its worker has ended, no process of an instance is left (each was seen to be
    gone), and so has its pool."""

    node: str


class ReportModel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The source of `model` at `revision` was opened."""

    node: str
    model: str
    revision: int
    facts: ModelFacts
    engine: str
    arguments: dict[str, Argument]
    """Those that shape the skeleton."""


class ReportUnusable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The source of `model` can't be read or converted. `final`: trying again will not help."""

    node: str
    model: str
    revision: int
    code: str
    message: str
    final: bool = True


class ReportStaged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str
    model: str
    revision: int
    weight_set: str
    size_bytes: int
    took_ms: int
    read_bytes: int = 0


class ReportDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str
    weight_set: str
    code: str


class ReportForeign(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Which processes that are not the plane's have memory of a device, all of them; none: no longer any."""

    node: str
    device: str
    processes: tuple[Outsider, ...] = ()


class ReportUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str
    instance: str
    directive: int
    model: str
    revision: int
    weight_set: str
    grant: int
    endpoint: str
    pid: int
    took_ms: int
    bytes_mapped: int
    bytes_used: int
    check: str = "skipped"
    image: str | None = None
    graphs: int | None = None
    graphs_again: int = 0
    steps: tuple[Step, ...] = ()


class ReportSlept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asleep as directed; or asleep again, when it was directed elsewhere, or was to make its image anew, and that could not be
    (`code`, `message`: why)."""

    node: str
    instance: str
    directive: int
    pid: int
    took_ms: int
    bytes_used: int
    steps: tuple[Step, ...] = ()
    code: str = ""
    message: str = ""


class ReportCheckpointed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Off its device as directed; or there still, when it was directed elsewhere and its device had no room (`code`: why)."""

    node: str
    instance: str
    directive: int
    pid: int
    took_ms: int
    host_bytes: int
    image: str | None = None
    steps: tuple[Step, ...] = ()
    code: str = ""
    message: str = ""


class ReportSaved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """On disk, as directed; no process is left."""

    node: str
    instance: str
    directive: int
    image: str
    took_ms: int
    steps: tuple[Step, ...] = ()


class ReportImageBuilt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str
    image: str
    configuration: str
    size_bytes: int
    took_ms: int
    proof: str
    fingerprint: dict[str, str]
    zero_bytes: int = 0


class ReportImageRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str
    image: str
    configuration: str
    code: str
    message: str


class ReportImageFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str
    image: str
    configuration: str
    step: str
    code: str
    message: str


class ReportImageRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: str
    image: str
    code: str


class ReportImageRoom(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is room on disk now for an instance that stayed off it for want of that."""

    node: str
    instance: str
    directive: int
    """The last one that the worker had seen."""


class ReportEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cold, as directed."""

    node: str
    instance: str
    directive: int
    took_ms: int


class ReportFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step failed or the process died; everything of it has been cleaned up and its cells are free."""

    node: str
    instance: str
    directive: int
    """The last directive that the worker had seen."""
    rung: Rung
    step: str
    code: str
    message: str
