"""NATS subjects and the small messages that are not events: beats, progress, asks. Pure: names and shapes only."""

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:  # `up` writes subjects into the server's configuration, and starts in a hurry
    from controlplane.envelope import Recorded

STREAM: Final = "EVENTS"
EVENTS: Final = "events.>"
COMMANDS: Final = "cmd.>"
COMMAND_GATEWAY: Final = "cmd.gateway"
COMMAND_OPERATOR: Final = "cmd.operator"
BEATS: Final = "beat.>"
BEAT_DESK: Final = "beat.desk"
"""The decider's word to itself (`Echo`), by the way that beats come: what tells it whether it hears."""
ASK_STATE: Final = "ask.state"
"""Request (empty) -> `fleet.dump` bytes of the decider's committed state."""
ASK_PULSE: Final = "ask.pulse"
"""Request (empty) -> the leading decider's pid, in digits."""


def command_node(node: str) -> str:
    """Where node `node`'s worker sends its hello and reports; its credentials allow no other `cmd.` subject."""
    return f"cmd.node.{node}.report"


def event(recorded: "Recorded") -> str:
    """`events.<node or _>.<aggregate>.<type>`: a worker filters on its node and on `_.model`."""
    return f"events.{recorded.node or '_'}.{recorded.event.AGGREGATE}.{recorded.type}"


def events_for_node(node: str) -> list[str]:
    """Filters of a worker: its own node's events and those of models."""
    return [f"events.{node}.>", "events._.model.>"]


def beat_node(node: str) -> str:
    return f"beat.node.{node}"


def beat_gateway(gateway: str) -> str:
    return f"beat.gateway.{gateway}"


def measure(node: str) -> str:
    """Request `Measure` -> `Measured`: how many tokens a prompt has, without an engine."""
    return f"node.{node}.measure"


def pulse(node: str) -> str:
    """Request (empty) -> the pid of the node's worker, in digits."""
    return f"node.{node}.pulse"


def images_of(node: str) -> str:
    """Request `ImageAsk` -> `ImageDone`: what an operator wants to know of a node's skeleton images."""
    return f"node.{node}.images"


class ImageAsk(msgspec.Struct, frozen=True, kw_only=True):
    verb: str
    """`verify` (one image), or `surplus`: which would have to go for the node to keep to its quota."""
    image: str = ""


class ImageDone(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is empty when it went well; `images`: those that it is about."""

    images: tuple[str, ...] = ()
    code: str = ""
    message: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is doing, within a step. Not an event; the latest one counts.

    `subject` is an instance id or `model:<name>` (inspecting, fetching, staging).
    """

    subject: str
    step: str
    done: int
    total: int
    """In bytes when `unit` is bytes; 0: unknown."""
    unit: str = "bytes"


class InstanceBeat(msgspec.Struct, frozen=True, kw_only=True):
    instance: str
    running: int
    tokens_per_s: float
    bytes_used: int
    host_bytes: int = 0
    """Off its device: memory of the host that it takes, as measured."""


class DeviceBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's memory in use, by owner, as its driver counts it. Shares of host memory have no such ledger."""

    skeletons: int = 0
    """Contexts, kernels and graphs of engines."""
    kv: int = 0
    own_weights: int = 0
    """In engines' own memory: being loaded, to be brought into the pool."""
    pool_context: int = 0
    pool_sets: int = 0
    """Weight sets, each counted once, whoever maps it."""
    foreign: dict[int, int] = {}
    """Process id -> bytes, of processes that are not this plane's."""
    driver: int = 0
    """In no process's name."""

    @property
    def total(self) -> int:
        mine = self.skeletons + self.kv + self.own_weights + self.pool_context + self.pool_sets
        return mine + sum(self.foreign.values()) + self.driver


class NodeBeat(msgspec.Struct, frozen=True, kw_only=True):
    """Once a second from each worker on `beat.node.<n>`, and at once when progress changes (at most 10/s)."""

    node: str
    incarnation: str
    at_ms: int
    pool_used_bytes: int
    pool_budget_bytes: int
    pool_ok: bool
    device_bytes: dict[str, int]
    """Measured bytes in use per device UUID."""
    owners: dict[str, DeviceBytes] = {}
    """Of GPUs: whose those bytes are."""
    host_available_bytes: int = 0
    """Memory that the host can still give; 0: not said."""
    instances: tuple[InstanceBeat, ...] = ()
    progress: tuple[Progress, ...] = ()


class GatewayBeat(msgspec.Struct, frozen=True, kw_only=True):
    """Once a second from each web process on `beat.gateway.<g>`."""

    gateway: str
    at_ms: int


class Echo(msgspec.Struct, frozen=True, kw_only=True):
    desk: str
    """Whose it is: another decider may have reigned a moment ago."""
    sent_s: float
    """By a clock of that decider's."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    kind: str
    body: msgspec.Raw
    """The OpenAI request body (JSON)."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int | None = None
    """None: this node can't tell (and `error` is empty), or there is no prompt to count."""
    error: str = ""
    """A sentence when the caller's prompt can't be rendered (e.g. the chat template refuses it), or is surely too long."""
    code: str = "invalid"
