"""The state's records of what runs, and of what: one frozen struct per aggregate (where it runs: `places`).

All times are Unix milliseconds of the event that set them.
"""

from typing import Final

import msgspec

from controlplane.rungs import Activity, Health, Rung
from controlplane.spec import Argument, ModelFacts, ModelSpec

REBUILD: Final = "rebuild"
"""Code of the directive by which a sleeper has its skeleton's image made anew, and goes on sleeping."""
FETCHED: Final = "fetched"
"""Code of the directive by which a sleeper leaves its GPU, since its skeleton is wanted on another one."""
MOVE: Final = "move"
"""Code of the directive by which an instance goes to another device."""
ANEW: Final = "operator"
"""Reason of an image's refusal that is nothing but somebody's wish for a new one."""

DISK_FULL: Final = frozenset({"no_space", "over_quota"})
"""Codes of what could not go to disk: the disk had no room, or what images may take of it."""
ENGINE_OUTDATED: Final = "engine_outdated"
"""Code of what can't go to disk: its process was started by another version, and an image would be none of today's."""


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    configuration: str
    engine: str
    architecture: str
    arguments: dict[str, Argument]
    skeleton_bytes: int | None = None
    """As measured; None: use the default until a transition has measured it."""
    host_bytes: int | None = None
    """What one took of the host when it was last at `checkpoint`; None: none was there since an engine was started anew."""


class SetBack(msgspec.Struct, frozen=True):
    failures: int
    retry_at_ms: int
    code: str
    message: str


class Rejection(msgspec.Struct, frozen=True):
    code: str
    message: str
    need_bytes: int
    limit_bytes: int


class Model(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    spec: ModelSpec
    revision: int
    origin: str
    registered_ms: int
    fresh_ms: int = 0
    """When this revision was made known, or an operator last said `retry`: from then on nodes inspect it."""
    first_revision: int = 1
    """Its revision when it was (last) registered: what served an older one belongs to a retired model of that name."""
    facts: ModelFacts | None = None
    """Of this revision; None until a node has inspected the source."""
    rejection: Rejection | None = None
    set_back: SetBack | None = None
    retired: bool = False


class WeightSet(msgspec.Struct, frozen=True, kw_only=True):
    weight_set: str
    node: str
    size_bytes: int
    models: tuple[tuple[str, int], ...]
    """(model, revision) pairs whose bytes these are."""
    used_ms: int
    dismissed: bool = False


class Directive(msgspec.Struct, frozen=True, kw_only=True):
    """Where the decider wants an instance to be."""

    number: int
    """Its event's position."""
    rung: Rung
    model: str | None
    revision: int
    grant: int | None
    code: str
    at_ms: int
    gang: tuple[int, ...] = ()
    """Grants of all ranks; empty: there is one."""
    operation: str | None = None
    victim_of: str | None = None
    need_bytes: int = 0
    """Promised to a climb on its device, or on each of them."""
    pool_bytes: int = 0
    """Promised to a climb in the pool, until its weights are staged."""
    overdue: bool = False


class Unsaved(msgspec.Struct, frozen=True):
    """Why an instance is not on disk, where it was to go. `tries`: how often it was, since it was up."""

    code: str
    message: str
    since_ms: int
    """Since when it stands where it does, those tries counted in: `Instance.since_ms` is that of the last one."""
    tries: int = 1
    room: bool = False
    """Whether its node has found room since."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One skeleton on one node. `rung` is where it was last reported; `directive` where it should be."""

    instance: str
    node: str
    configuration: str
    created_ms: int
    rung: Rung = Rung.COLD
    since_ms: int = 0
    """When `rung` was reached."""
    directive: Directive | None = None
    model: str | None = None
    """The model it serves while `up`; the last one below."""
    revision: int = 0
    weight_set: str | None = None
    grant: int | None = None
    """Number of the grant it holds."""
    device: str | None = None
    """Where its skeleton is: the device of its last grant. Asleep it can be woken there only; at `checkpoint` it was there."""
    ranks: tuple[str, ...] = ()
    """Of a gang: its devices, in order of rank, `device` the first; empty: there is one."""
    gang: tuple[int, ...] = ()
    """Of a gang: the numbers of the grants that its ranks hold, `grant` the first."""
    moving_to: int | None = None
    """Number of the second grant that it holds while it moves to another device."""
    image: str | None = None
    """What it was last saved to, or restored from."""
    endpoint: str | None = None
    pid: int | None = None
    running: int = 0
    """Requests routed to it and not ended."""
    served: int = 0
    """Requests that have ended on it since it came up."""
    idle_since_ms: int = 0
    """When the last request ended, or when it came up."""
    leased_to: frozenset[str] = frozenset()
    """Requests for which it climbed and that have not ended: while there are any, it is no victim."""
    bytes_mapped: int = 0
    bytes_used: int = 0
    host_bytes: int = 0
    """At `checkpoint`: memory of the host that the whole skeleton takes. Nothing of it is on a device then."""
    unsaved: Unsaved | None = None
    health: Health = Health.OK

    @property
    def devices(self) -> tuple[str, ...]:
        """All on which its skeleton is, in order of rank."""
        return self.ranks or ((self.device,) if self.device else ())

    @property
    def grants(self) -> tuple[int, ...]:
        """The numbers of all that it holds: of its ranks, then the one that it moves to."""
        held = self.gang or ((self.grant,) if self.grant is not None else ())
        return held if self.moving_to is None else (*held, self.moving_to)

    @property
    def activity(self) -> Activity:
        if self.directive is None or self.directive_settled:
            return Activity.SETTLED
        climbs = self.directive.rung is Rung.UP or self.directive.rung.height > self.rung.height
        return Activity.CLIMBING if climbs else Activity.DESCENDING

    @property
    def directive_settled(self) -> bool:
        """Whether the last directive has been reached: same rung and, when up, the same model, and no move under way.

        `cold` is never reached: an instance that is cold as directed has ended. (`rung` is also cold while the first
        climb is under way; a stop of that climb must not look finished.) A sleeper that has its image made anew
        sleeps again once it has given the place for the proof back.
        """
        d = self.directive
        if d is None:
            return True
        if self.moving_to is not None:
            return False
        if d.code == REBUILD and self.rung is Rung.SLEEP:
            return self.grant is None
        if d.rung is not self.rung or d.rung is Rung.COLD:
            return False
        return d.rung is not Rung.UP or (self.model, self.revision) == (d.model, d.revision)


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A skeleton on a node's disk."""

    image: str
    node: str
    configuration: str
    size_bytes: int = 0
    zero_bytes: int = 0
    """Of memory that is all zeros, and is on no disk."""
    made_ms: int = 0
    used_ms: int = 0
    """When an instance last came up from it; 0: never."""
    uses: int = 0
    state: str = "ok"
    """`ok`; `refused`: something that it depends on has changed, it is built anew; `failed`: an operator must act."""
    code: str = ""
    message: str = ""
    proof: str = ""
    pinned: bool = False
    """By an operator; the settings pin by model or configuration (`Node.image_pins`)."""
    leaving: str = ""
    """Who asked for its removal; empty: it stays."""
