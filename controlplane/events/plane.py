"""Events of the plane itself: reigns of deciders, gateways (web processes), applied settings."""

import msgspec

from controlplane.events.record import Event


class ReignBegan(Event, frozen=True, kw_only=True):
    """A decider became leader with a new epoch."""

    AGGREGATE, KEY = "decider", "host"
    host: str
    pid: int
    epoch: int


class GatewayOpened(Event, frozen=True, kw_only=True):
    """A web process began to admit requests; each request belongs to one gateway, which streams it to its caller."""

    AGGREGATE, KEY = "gateway", "gateway"
    gateway: str
    host: str
    pid: int


class GatewayClosed(Event, frozen=True, kw_only=True):
    """A web process stopped, fell silent or was replaced; the requests it held have ended."""

    AGGREGATE, KEY, ENDS = "gateway", "gateway", True
    gateway: str
    code: str
    """`stopped`, `silent` or `replaced`."""


class Revision(msgspec.Struct, frozen=True):
    model: str
    fields: tuple[str, ...]


class SettingsApplied(Event, frozen=True, kw_only=True):
    """A settings file was read and its difference to the registered models applied."""

    AGGREGATE, KEY = "settings", "path"
    path: str
    digest: str
    added: tuple[str, ...]
    revised: tuple[Revision, ...]
    retired: tuple[str, ...]
    unchanged: int
    limits: tuple[str, ...] = ()
    """Fields of `NodeLimits` that changed; `NodeLimitsChanged` has what they were and are."""
