"""Memory of the host that engines off their devices take, against what their node's limits allow."""

from controlplane.decisions import descent, images, standing
from controlplane.decisions.draft import Draft
from controlplane.fleet.members import Instance
from controlplane.fleet.reach import no_checkpoint
from controlplane.fleet.state import Fleet
from controlplane.quantities import human_bytes, need_and_limit
from controlplane.rungs import Rung

NO_HOST_MEMORY = "no_host_memory"
"""Reason of a refusal, and code of an operation that failed: engines off their devices would take more than they may."""


def held_bytes(fleet: Fleet, node: str, *, but: str = "") -> int:
    """What engines at `checkpoint` take there, as measured, and what those on their way to it are promised; `but` one."""
    return sum(_held(fleet, i) for i in fleet.instances.values() if i.node == node and i.instance != but)


def _held(fleet: Fleet, instance: Instance) -> int:
    if instance.rung is Rung.CHECKPOINT:
        return instance.host_bytes
    directive = instance.directive
    bound = directive is not None and directive.rung is Rung.CHECKPOINT and not instance.directive_settled
    return need_bytes(fleet, instance) if bound else 0


def need_bytes(fleet: Fleet, instance: Instance) -> int:
    """What it will take: as the last of its configuration did, unless an engine has been started since; else at least as much
    as an image of it has, or what it has on its device."""
    configuration = fleet.configurations.get(instance.configuration)
    if configuration is not None and configuration.host_bytes is not None:
        return configuration.host_bytes
    saved = max((image.size_bytes + image.zero_bytes for image in images.of(fleet, instance)), default=0)
    each = configuration.skeleton_bytes if configuration is not None else None
    measured = each * max(1, len(instance.ranks)) if each is not None else None
    return max(saved, measured or instance.bytes_used - instance.bytes_mapped)


def lacking(fleet: Fleet, instance: Instance) -> str | None:
    """Why it can't go to `checkpoint` now for want of its host's memory, with both numbers; None: there is room."""
    node = fleet.nodes.get(instance.node)
    if node is None or node.checkpoint_bytes is None:
        return None
    need, held = need_bytes(fleet, instance), held_bytes(fleet, instance.node, but=instance.instance)
    left = node.checkpoint_bytes - held
    if need <= left:
        return None
    needs, has = need_and_limit(need, max(0, left))
    return (
        f"{instance.instance} needs {needs} of {instance.node}'s memory off its device, and {has} is left: engines there may "
        f"take {human_bytes(node.checkpoint_bytes)}, and take {human_bytes(held)} ([node] checkpoint_bytes in the settings)"
    )


def unable(fleet: Fleet, instance: Instance) -> str | None:
    """Why it does not go to `checkpoint` now, for whatever reason; None: it can."""
    return no_checkpoint(fleet, instance) or lacking(fleet, instance)


def below(draft: Draft, instance: Instance, code: str, *, victim_of: str | None = None, operation: str | None = None) -> None:
    """Direct one that sleeps, or is at `checkpoint`, past that rung: to disk where its image can be used, else to its end."""
    if images.hindrance(draft.fleet, instance) is None and any(
        image.state == "ok" for image in images.of(draft.fleet, instance)
    ):
        assert images.save(draft, instance, code, victim_of=victim_of, operation=operation)
    else:
        descent.direct(draft, instance, Rung.COLD, code, victim_of=victim_of, operation=operation)


def relieve(draft: Draft) -> None:
    """More is taken than may be (the limit was lowered, or engines grew): idle ones go, the longest there first."""
    for node in draft.fleet.nodes.values():
        if node.checkpoint_bytes is None:
            continue
        over = held_bytes(draft.fleet, node.node) - node.checkpoint_bytes
        there = [i for i in draft.fleet.instances.values() if i.node == node.node and i.rung is Rung.CHECKPOINT]
        over -= sum(i.host_bytes for i in there if standing.leaving(i))
        for instance in sorted(there, key=lambda i: (i.since_ms, i.instance)):
            if over <= 0:
                break
            if standing.idle(draft.fleet, instance):
                below(draft, instance, NO_HOST_MEMORY)
                over -= instance.host_bytes
