"""Where instances stand: the questions that several decisions ask about them."""

from collections.abc import Iterable
from typing import Final

from controlplane.fleet.members import DISK_FULL, FETCHED, REBUILD, Instance, Model
from controlplane.fleet.state import Fleet
from controlplane.rungs import Rung

NO_ROOM: Final = frozenset({"device_full", "no_memory", "no_room", "over_budget"}) | DISK_FULL
"""Codes with which a worker says that an engine sleeps on, since there was no room for what it was told."""


def heard(fleet: Fleet, node: str) -> bool:
    known = fleet.nodes.get(node)
    return known is not None and known.heard


def serving(fleet: Fleet, model: Model, *, revision: int = 0) -> Instance | None:
    """The instance that takes the model's next request: `up`, not being directed away, the newest revision, the shortest queue.

    An older revision serves until its next climb (`revision`: the least that will do), but never what an earlier,
    retired model of the same name left behind.
    """
    best: Instance | None = None
    least = max(revision, model.first_revision)
    for instance in fleet.instances.values():
        if instance.model != model.model or instance.rung is not Rung.UP or instance.revision < least:
            continue
        if not instance.directive_settled or not heard(fleet, instance.node):
            continue
        if best is None or (-instance.revision, instance.running) < (-best.revision, best.running):
            best = instance
    return best


def climbing(fleet: Fleet, model: Model) -> Instance | None:
    """The instance that is on its way up to serve the model's current revision: one climb serves all who wait."""
    for instance in fleet.instances.values():
        directive = instance.directive
        if (
            directive is not None
            and directive.rung is Rung.UP
            and directive.model == model.model
            and directive.revision == model.revision
            and not instance.directive_settled
            and heard(fleet, instance.node)
        ):
            return instance
    return None


def returning(fleet: Fleet, model: Model) -> Instance | None:
    """The instance that served the model and is on its way to `sleep` or `checkpoint`: waited for, not turned round halfway.

    A sleeper that has its image made anew will sleep again, too, in a few seconds; one that is fetched from its GPU is off it.
    """
    for instance in fleet.instances.values():
        directive = instance.directive
        current = model.facts is not None and instance.configuration == model.facts.configuration
        if directive is None or directive.rung not in (Rung.SLEEP, Rung.CHECKPOINT) or not current:
            continue
        mine = instance.model == model.model if instance.rung is Rung.UP else directive.code in (REBUILD, FETCHED)
        if mine and leaving(instance) and heard(fleet, instance.node):
            return instance
    return None


def leaving(instance: Instance) -> bool:
    """Directed below `up` and not there yet: what it holds counts as promised to be free."""
    below = instance.directive is not None and instance.directive.rung is not Rung.UP and not rising(instance)
    return below and not instance.directive_settled


def fell_short(instance: Instance) -> bool:
    """It rests where it is for want of room for what it was told last."""
    return instance.directive is not None and instance.directive.code in NO_ROOM


def deserted(fleet: Fleet, instance: Instance) -> bool:
    """It climbs from nothing for a request, and nobody waits for its model any more. To finish would cost the rest of the start
    and then a descent; a climb from a skeleton is over before it could be called back."""
    directive = instance.directive
    if directive is None or instance.directive_settled or directive.rung is not Rung.UP or directive.code != "request":
        return False
    asked = any(o.kind == "load" and o.model == directive.model for o in fleet.operations.values())
    return instance.rung is Rung.COLD and directive.model not in fleet.waiting and not asked


def rising(instance: Instance) -> bool:
    """On its way from the disk to `checkpoint`, where it will wait for a place. It may be told to go on to `up` at any time."""
    directive = instance.directive
    return directive is not None and directive.rung is Rung.CHECKPOINT and instance.rung is Rung.SAVED


def idle(fleet: Fleet, instance: Instance) -> bool:
    """`up`, asleep, checkpointed or saved as directed, nobody's request on it, leased to none, and its worker can be told."""
    return (
        instance.directive_settled
        and instance.rung in (Rung.UP, Rung.SLEEP, Rung.CHECKPOINT, Rung.SAVED)
        and not instance.running
        and not instance.leased_to
        and heard(fleet, instance.node)
    )


def evictable(fleet: Fleet, instance: Instance, *, overdue: bool = False) -> bool:
    """Whether it may be sent to sleep for somebody else. One that still loads, or runs, or is leased, may not.

    `overdue`: the one who asks has waited past the bound, and those who wait for this instance's model came later.
    """
    if instance.rung is not Rung.UP or not idle(fleet, instance):
        return False
    return overdue or not fleet.waiting.get(instance.model or "")


def obsolete(fleet: Fleet, instance: Instance) -> bool:
    """Its model is retired (or was, and is now another one of the same name)."""
    model = fleet.models.get(instance.model or "")
    return instance.model is not None and (model is None or model.retired or instance.revision < model.first_revision)


def name(fleet: Fleet, device: str | None) -> str:
    """What people call the device."""
    known = fleet.devices.get(device or "")
    return known.name if known else "no device"


def names(fleet: Fleet, devices: Iterable[str]) -> str:
    return ", ".join(name(fleet, device) for device in devices) or name(fleet, None)
