"""Events of instances and the grants they hold."""

import msgspec

from controlplane.events.record import Event
from controlplane.rungs import Rung


class Step(msgspec.Struct, frozen=True):
    """One step of a transition, as measured by the worker."""

    name: str
    took_ms: float
    moved_bytes: int = 0


class GrantGiven(Event, frozen=True, kw_only=True):
    """An instance holds cells of a device, exclusively. The event's position is the grant's number (its fencing token)."""

    AGGREGATE, KEY = "device", "device"
    node: str
    device: str
    instance: str
    offset: int
    """First cell, a multiple of `cells`."""
    cells: int
    gang: int = 0
    """Number of the grant of the gang's first rank; 0: this is it, or there is no gang."""
    rank: int = 0


class GrantReturned(Event, frozen=True, kw_only=True):
    """The cells are free: the worker measured the memory as free, or the process that used it is gone."""

    AGGREGATE, KEY = "device", "device"
    node: str
    device: str
    instance: str
    grant: int


class InstanceCreated(Event, frozen=True, kw_only=True):
    AGGREGATE, KEY = "instance", "instance"
    node: str
    instance: str
    configuration: str


class InstanceDirected(Event, frozen=True, kw_only=True):
    """The decider's word where the instance should be. The event's position is the directive's number: reports name it."""

    AGGREGATE, KEY = "instance", "instance"
    node: str
    instance: str
    rung: Rung
    model: str | None = None
    """The model to serve; set when `rung` is up."""
    revision: int = 0
    grant: int | None = None
    gang: tuple[int, ...] = ()
    """Numbers of the grants of all ranks, in order of rank, `grant` the first; empty: it takes one device."""
    code: str = ""
    """Why: `request`, `load`, `waiting` (its model waits for a place), `move`, `idle`, `evicted`, `operator`, `retired`,
    `rebuild` (its image is made anew), `failed`; or of what it sleeps on for, the code of what could not be."""
    for_request: str | None = None
    """The request that made it climb; it has a lease until that request has ended."""
    victim_of: str | None = None
    """The model for which this instance makes room."""
    need_bytes: int = 0
    """Bytes of its device (of each, in a gang) that are promised to a climb."""
    pool_bytes: int = 0
    """Bytes of the node's pool that are promised to a climb, until its weights are staged."""


class InstanceUp(Event, frozen=True, kw_only=True):
    """It serves `model`: the engine said so, the memory agrees, the check (if any) passed."""

    AGGREGATE, KEY = "instance", "instance"
    node: str
    instance: str
    directive: int
    model: str
    revision: int
    weight_set: str
    grant: int
    endpoint: str
    """URL of the instance's frontend, e.g. `http://127.0.0.1:41733`."""
    pid: int
    took_ms: int
    bytes_mapped: int
    bytes_used: int
    """Measured bytes on the device (on all of them, in a gang), mapped weights included."""
    check: str = "skipped"
    """`same_tokens`, `recorded` (first time) or `skipped`."""
    image: str | None = None
    """The image that its process was restored from in this climb."""
    graphs: int | None = None
    """CUDA graphs that its process captured when it started, all ranks together; None: an engine without any."""
    graphs_again: int = 0
    """Captured since: graphs and their addresses outlast a sleep, a move and a restore, so 0 is what was counted."""
    steps: tuple[Step, ...] = ()


class InstanceSlept(Event, frozen=True, kw_only=True):
    """The skeleton alone is left: weights unmapped, KV gone, memory measured."""

    AGGREGATE, KEY = "instance", "instance"
    node: str
    instance: str
    directive: int
    pid: int
    took_ms: int
    bytes_used: int
    steps: tuple[Step, ...] = ()
    code: str = ""
    """Why it is only here, where it was directed elsewhere; empty: it is where it should be."""
    message: str = ""


class InstanceCheckpointed(Event, frozen=True, kw_only=True):
    """The process is on the CPU alone, parked: nothing of it is on a device. It is restored or killed, nothing else."""

    AGGREGATE, KEY = "instance", "instance"
    node: str
    instance: str
    directive: int
    pid: int
    took_ms: int
    host_bytes: int
    """Memory of the host that it takes, what was on the device included."""
    image: str | None = None
    """The image that it was restored from: it has come up from `saved`, to wait for a place."""
    steps: tuple[Step, ...] = ()
    code: str = ""
    """As in `InstanceSlept`."""
    message: str = ""


class InstanceSaved(Event, frozen=True, kw_only=True):
    """No process is left; the skeleton is on the node's disk, and comes back from there."""

    AGGREGATE, KEY = "instance", "instance"
    node: str
    instance: str
    directive: int
    image: str
    took_ms: int
    steps: tuple[Step, ...] = ()


class ImageRoomFound(Event, frozen=True, kw_only=True):
    """The disk, or the quota of images, has room by now for an instance that stayed off it for want of that."""

    AGGREGATE, KEY = "instance", "instance"
    node: str
    instance: str


class InstanceEnded(Event, frozen=True, kw_only=True):
    """Cold as directed, or as its node left: no process is left."""

    AGGREGATE, KEY, ENDS = "instance", "instance", True
    node: str
    instance: str
    directive: int
    took_ms: int


class InstanceFailed(Event, frozen=True, kw_only=True):
    """A step failed or its process died. What is left was cleaned up: the instance is cold and gone, `rung` is where it was."""

    AGGREGATE, KEY, ENDS = "instance", "instance", True
    node: str
    instance: str
    directive: int
    rung: Rung
    step: str
    code: str
    """`engine_died`, `engine_hung`, `start_failed`, `step_deadline`, `no_room`, `weights_unusable`, `check_mismatch`,
    `draft_changed`, `lost`, `holder_died`, ..."""
    message: str


class InstanceOverdue(Event, frozen=True, kw_only=True):
    """A watchdog's word: the transition has outlasted every deadline of its steps and nobody reported."""

    AGGREGATE, KEY = "instance", "instance"
    node: str
    instance: str
    directive: int
    waited_ms: int
