"""What the REST API shows, as structs. Times are Unix milliseconds, sizes bytes."""

import msgspec

from controlplane.rungs import Activity, Rung
from controlplane.spec import ModelFacts, ModelSpec
from controlplane.subjects import DeviceBytes
from web.views.hostmemory import HostView


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    address: str
    heard: bool
    left: bool
    """Its plane was ended in order, and has not been started again."""
    version: str
    pool_budget_bytes: int
    pool_used_bytes: int | None
    """None: no beat yet, or none left."""
    host: HostView
    devices: list[str]
    instances: list[str]
    notes: list[str]
    """Lines of its settings that mean nothing as things are, and what to write."""
    unsaved: list[str]
    """Which instances are not on disk, where they were to go, and why."""


class CellsView(msgspec.Struct, frozen=True, kw_only=True):
    """A grant on a device."""

    grant: int
    instance: str
    model: str | None
    offset: int
    cells: int
    since_ms: int


class OutsiderView(msgspec.Struct, frozen=True, kw_only=True):
    """A process on a device that is not the plane's."""

    pid: int
    name: str
    """Of its program; empty: unknown."""
    size_bytes: int


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    name: str
    node: str
    kind: str
    size_bytes: int
    used_bytes: int | None
    """Measured; None: no beat yet, or none left."""
    owners: DeviceBytes | None
    """Of a GPU: whose these are, as its driver tells processes apart."""
    foreign: list[OutsiderView]
    """Processes of others, as placement counts them; a change counts once it has lasted for two seconds."""
    cells: int
    free_cells: int
    grants: list[CellsView]


class ProgressView(msgspec.Struct, frozen=True, kw_only=True):
    step: str
    done: int
    total: int
    unit: str


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    spec: ModelSpec
    revision: int
    origin: str
    registered_ms: int
    retired: bool
    state: str
    """`up`, `climbing`, `sleep`, `descending`, `skeleton_asleep` (one that it shares sleeps), `cold`, `backing_off`,
    `rejected`, `uninspected`, `retired`."""
    words: str
    """How it stands, as the page says it."""
    why: str
    """More of that, in a sentence; often nothing."""
    facts: ModelFacts | None
    error: dict[str, object] | None
    """Why it can't be served, or not now: code, message and figures."""
    instances: list[str]
    queued: int
    running: int
    progress: ProgressView | None


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    instance: str
    node: str
    configuration: str
    rung: Rung
    activity: Activity
    health: str
    model: str | None
    target: Rung | None
    target_model: str | None
    why: str
    grant: int | None
    running: int
    served: int
    pid: int | None
    since_ms: int
    idle_since_ms: int
    bytes_mapped: int
    bytes_used: int
    host_bytes: int
    """Off its device: memory of the host that it takes."""
    tokens_per_s: float | None
    progress: ProgressView | None


class WeightsView(msgspec.Struct, frozen=True, kw_only=True):
    weight_set: str
    node: str
    size_bytes: int
    models: list[str]
    used_ms: int
    dismissed: bool


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request, open or ended."""

    request: str
    model: str
    state: str
    """`queued`, `running`, `finished`, `failed` or `cancelled`."""
    kind: str
    streamed: bool
    accepted_ms: int
    instance: str | None = None
    attempts: int = 0
    place: int | None = None
    code: str = ""
    reason: str = ""
    prompt_tokens: int | None = 0
    """None, and likewise of its completion: it ended before anybody had counted them."""
    completion_tokens: int | None = 0
    queued_ms: int | None = None
    first_token_ms: int | None = None
    took_ms: int | None = None
    finish_reason: str = ""
    by: str = ""
    phase: str = ""


class OperationView(msgspec.Struct, frozen=True, kw_only=True):
    operation: str
    kind: str
    state: str
    """`open`, `succeeded` or `failed`."""
    model: str | None
    instance: str | None
    actor: str
    requested_ms: int | None
    position: int | None = None
    took_ms: int | None = None
    note: str = ""
    code: str = ""
    message: str = ""
    progress: ProgressView | None = None
