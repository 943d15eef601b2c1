"""How an instance stands, in a tone and in words: the same words wherever a page speaks of it."""

from collections.abc import Mapping

import msgspec

from controlplane.fleet import Fleet, Instance, Node
from controlplane.rungs import Activity, Health, Rung
from controlplane.subjects import InstanceBeat, NodeBeat
from controlplane.subjects import Progress as Reported
from web.views.figures import percent, size

CAUSES = {
    "request": "for a request", "load": "on request of an operator", "idle": "idle for long enough", "evicted": "makes room",
    "operator": "on request of an operator", "retired": "its model is retired", "failed": "after a failure",
    "waiting": "waits for a place", "fetched": "is wanted on another device", "move": "on request of an operator",
    "rebuild": "its image is made anew",
    "no_host_memory": "too much of its host's memory is taken", "no_device_memory": "its device has no room for it",
    "no_memory": "its host has no room for it", "device_full": "its device has no room for it",
    "over_budget": "the pool has no room for its weights", "no_space": "its disk has no room for its image",
    "over_quota": "its image would be over the quota", "engine_outdated": "another version has started it",
}  # fmt: skip
"""Directive code -> why, as it reads after a colon."""


STEPS = {
    "inspecting": "opening its source", "prepare": "preparing its source", "stage": "reading weights",
    "deposit": "laying out weights", "start_holder": "starting the engine", "start_frontend": "starting the engine",
    "start_engine": "starting the engine", "connect": "starting the engine", "restore": "restoring from disk",
    "cuda_restore": "back onto the GPU", "take_cells": "taking its cells", "fill": "filling the device",
    "attach": "mapping weights", "wake": "mapping weights", "check": "checking an answer", "serve": "opening to requests",
    "stop_serving": "closing to requests", "drain": "letting requests finish", "sleep": "letting go of its weights",
    "detach": "letting go of its weights", "verify": "measuring what is free", "drop_cells": "giving its cells back",
    "checkpoint": "going off the GPU", "seek": "looking for its image", "build": "writing to disk",
    "end_engine": "ending the engine", "clear": "ending its processes",
}  # fmt: skip
"""Steps of a worker, as a person reads them; those of a newer worker are shown by their names."""


class Progress(msgspec.Struct, frozen=True):
    """How far a step is. `total` 0: nobody knows how much there is."""

    step: str
    done: int
    total: int
    in_bytes: bool


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """`tone` is the colour class: up, climb, descend, sleep, cold, failed."""

    tone: str
    words: str
    since_ms: int
    why: str = ""
    progress: Progress | None = None
    overdue: bool = False


def reported(beats: Mapping[str, NodeBeat], node: str | None, subject: str) -> Progress | None:
    """The last progress that a node (None: any) told of `subject` (an instance, or `model:<name>`)."""
    for beat in beats.values() if node is None else filter(None, (beats.get(node),)):
        for progress in beat.progress:
            if progress.subject == subject:
                return _progress(progress)
    return None


def climb_progress(fleet: Fleet, beats: Mapping[str, NodeBeat], model: str) -> Progress | None:
    """How far the climb that waits for `model` is, or the fetch of its source; None: no node tells."""
    for instance in fleet.instances.values():
        directive = instance.directive
        if directive is not None and not instance.directive_settled and directive.model == model:
            found = reported(beats, instance.node, instance.instance) or reported(beats, instance.node, f"model:{model}")
            if found is not None:
                return found
    return reported(beats, None, f"model:{model}")


def told(progress: Progress) -> str:
    """A step in words: `mapping weights, 43 % (221 MiB of 515 MiB)`."""
    if not progress.total:
        return progress.step
    far = f"{progress.step}, {percent(progress.done, progress.total):.0f} %"
    return f"{far} ({size(progress.done)} of {size(progress.total)})" if progress.in_bytes else far


def _progress(told: Reported) -> Progress:
    done = max(told.done, 0)
    done = min(done, told.total) if told.total > 0 else done
    return Progress(STEPS.get(told.step, told.step.replace("_", " ")), done, told.total, told.unit == "bytes")


def beat_of(beats: Mapping[str, NodeBeat], instance: Instance) -> InstanceBeat | None:
    node = beats.get(instance.node)
    return next((b for b in node.instances if b.instance == instance.instance), None) if node else None


def away(node: Node | None) -> str:
    """Why nothing is heard of a node, in words; empty: it is."""
    if node is None or node.heard:
        return ""
    return "has left" if not node.incarnation else "is silent"


def standing(fleet: Fleet, beats: Mapping[str, NodeBeat], instance: Instance) -> Standing:
    """Say where the instance is and what it does."""
    directive = instance.directive
    overdue = directive is not None and directive.overdue
    node = fleet.nodes.get(instance.node)
    if instance.health is not Health.OK:
        return Standing(tone="failed", words=instance.health.value, since_ms=instance.since_ms)
    if gone := away(node):
        tone = "failed" if node is not None and node.incarnation else "cold"  # one that has left is as it was meant to be
        return Standing(tone=tone, words=f"{instance.rung.value}, node {gone}", since_ms=instance.since_ms)
    if directive is None or instance.activity is Activity.SETTLED:
        tone = {Rung.UP: "up", Rung.COLD: "cold"}.get(instance.rung, "sleep")
        return Standing(
            tone=tone, words="asleep" if instance.rung is Rung.SLEEP else instance.rung.value, since_ms=instance.since_ms
        )
    progress = reported(beats, instance.node, instance.instance)
    if progress is None and directive.model is not None:
        progress = reported(beats, instance.node, f"model:{directive.model}")
    why = f"makes room for {directive.victim_of}" if directive.victim_of else CAUSES.get(directive.code, directive.code)
    if instance.activity is Activity.CLIMBING:
        switches = "switching" if instance.moving_to is None else "moving"
        start = {Rung.COLD: "starting", Rung.UP: switches, Rung.SAVED: "restoring"}.get(instance.rung, "waking")
        return Standing(tone="climb", words=start, since_ms=directive.at_ms, why=why, progress=progress, overdue=overdue)
    words = {Rung.COLD: "stopping", Rung.CHECKPOINT: "leaving its device", Rung.SAVED: "going to disk"}.get(
        directive.rung, "going to sleep"
    )
    return Standing(tone="descend", words=words, since_ms=directive.at_ms, why=why, progress=progress, overdue=overdue)


def shown_model(instance: Instance) -> str | None:
    """The model to name it by: the one it serves or is on its way to serve; asleep, the last one."""
    directive = instance.directive
    if directive is not None and directive.rung is Rung.UP and directive.model is not None:
        return directive.model
    return instance.model
