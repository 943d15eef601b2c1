"""Events of models and configurations."""

from controlplane.events.record import Event
from controlplane.spec import Argument, ModelFacts, ModelSpec


class ModelRegistered(Event, frozen=True, kw_only=True):
    """A model is known by name. It can be asked for once a node has inspected its source."""

    AGGREGATE, KEY = "model", "model"
    model: str
    spec: ModelSpec
    revision: int = 1
    origin: str = "api"
    """`api` or `settings`: a settings file retires only what a settings file registered."""


class ModelRevised(Event, frozen=True, kw_only=True):
    """Its spec changed. Soft fields count at once; hard ones (source, engine, arguments, gpus) at the next climb."""

    AGGREGATE, KEY = "model", "model"
    model: str
    spec: ModelSpec
    revision: int
    fields: tuple[str, ...]
    hard: bool
    over_settings: bool = False
    """By an operator, and a settings file has the model: what that says counts again when it is applied next."""


class ModelRetired(Event, frozen=True, kw_only=True):
    """No new requests; running ones finish, then its instances descend."""

    AGGREGATE, KEY = "model", "model"
    model: str
    over_settings: bool = False
    """By an operator, and a settings file names the model: it comes back when that is applied next."""


class ModelInspected(Event, frozen=True, kw_only=True):
    """A node opened the source and says what it needs."""

    AGGREGATE, KEY = "model", "model"
    model: str
    revision: int
    inspected_by: str
    facts: ModelFacts


class ModelRejected(Event, frozen=True, kw_only=True):
    """The model can't be served: it can never fit, or its source is unusable. Lasts until it is revised or retried."""

    AGGREGATE, KEY = "model", "model"
    model: str
    revision: int
    code: str
    message: str
    need_bytes: int = 0
    limit_bytes: int = 0


class ModelSetBack(Event, frozen=True, kw_only=True):
    """A start of this model failed; no further one before `retry_at_ms`."""

    AGGREGATE, KEY = "model", "model"
    model: str
    failures: int
    retry_at_ms: int
    """Unix milliseconds."""
    code: str
    message: str


class ModelCleared(Event, frozen=True, kw_only=True):
    """The back-off is over: a start succeeded, or an operator said `retry`."""

    AGGREGATE, KEY = "model", "model"
    model: str


class ConfigurationFound(Event, frozen=True, kw_only=True):
    """A new kind of skeleton, or a better measurement of one."""

    AGGREGATE, KEY = "configuration", "configuration"
    configuration: str
    engine: str
    architecture: str
    arguments: dict[str, Argument]


class SkeletonMeasured(Event, frozen=True, kw_only=True):
    """Bytes that a skeleton of this configuration takes on a device, without weights and KV, as a transition measured it."""

    AGGREGATE, KEY = "configuration", "configuration"
    configuration: str
    size_bytes: int
