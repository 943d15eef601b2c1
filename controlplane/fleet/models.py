"""What events mean for the models that can be asked for, and for their aliases."""

from immutables import Map
from msgspec.structs import replace

from controlplane.events import (
    ModelCleared,
    ModelInspected,
    ModelRegistered,
    ModelRejected,
    ModelRetired,
    ModelRevised,
    ModelSetBack,
)
from controlplane.fleet import requests
from controlplane.fleet.members import Model, Rejection, SetBack
from controlplane.fleet.state import Fleet


def registered(fleet: Fleet, e: ModelRegistered, at: int) -> Fleet:
    model = Model(
        model=e.model, spec=e.spec, revision=e.revision, origin=e.origin, registered_ms=at, fresh_ms=at,
        first_revision=e.revision,
    )  # fmt: skip
    return _with(fleet, model)


def revised(fleet: Fleet, e: ModelRevised, at: int) -> Fleet:
    model = replace(fleet.models[e.model], spec=e.spec, revision=e.revision)
    if e.hard:
        model = replace(model, facts=None, rejection=None, set_back=None, fresh_ms=at)
    return _with(fleet, model)


def retired(fleet: Fleet, e: ModelRetired) -> Fleet:
    return replace(_changed(fleet, e.model, retired=True), aliases=_aliases_without(fleet, e.model))


def inspected(fleet: Fleet, e: ModelInspected) -> Fleet:
    return _changed(fleet, e.model, facts=e.facts, rejection=None)


def rejected(fleet: Fleet, e: ModelRejected) -> Fleet:
    return _changed(fleet, e.model, rejection=Rejection(e.code, e.message, e.need_bytes, e.limit_bytes))


def set_back(fleet: Fleet, e: ModelSetBack) -> Fleet:
    counted = requests.set_back(fleet, e.model)
    return _changed(counted, e.model, set_back=SetBack(e.failures, e.retry_at_ms, e.code, e.message))


def cleared(fleet: Fleet, e: ModelCleared, at: int) -> Fleet:
    return _changed(fleet, e.model, set_back=None, rejection=None, fresh_ms=at)


def _changed(fleet: Fleet, model: str, **changes: object) -> Fleet:
    return replace(fleet, models=fleet.models.set(model, replace(fleet.models[model], **changes)))


def _with(fleet: Fleet, model: Model) -> Fleet:
    aliases = _aliases_without(fleet, model.model)
    for alias in model.spec.aliases:
        aliases = aliases.set(alias, model.model)
    return replace(fleet, models=fleet.models.set(model.model, model), aliases=aliases)


def _aliases_without(fleet: Fleet, model: str) -> "Map[str, str]":
    aliases = fleet.aliases
    for alias, target in fleet.aliases.items():
        if target == model:
            aliases = aliases.delete(alias)
    return aliases
