"""Models: how each stands, what it shares, and what an operator can do about it now."""

from collections.abc import Mapping

import msgspec

from controlplane.fleet import Fleet, Instance, Model
from controlplane.fleet.reach import no_checkpoint, why_still
from controlplane.rungs import Rung
from controlplane.subjects import NodeBeat
from controlplane.unopened import unopened
from web.views.figures import share, size
from web.views.hues import hues
from web.views.images import off_disk
from web.views.standing import Progress, reported, shown_model, standing


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """A button. `why_not` is set when it can't apply; `operation` while one of its kind is open."""

    verb: str
    label: str
    why_not: str = ""
    operation: str | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The last operation of a model, when it failed."""

    operation: str
    kind: str
    code: str
    message: str
    at_ms: int
    position: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """`until_ms`: when it ends by itself (a back-off); `since_ms`: when it began, 0 if nobody can say."""

    tone: str
    words: str
    since_ms: int = 0
    until_ms: int = 0
    message: str = ""
    progress: Progress | None = None


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    aliases: tuple[str, ...]
    note: str
    engine: str
    architecture: str
    weight_bytes: int | None
    context_tokens: int | None
    share: str
    configuration: str | None
    hue: int
    shared_with: tuple[str, ...]
    """Other models of the same configuration: one skeleton serves any of them."""
    state: State
    running: int
    waiting: int
    actions: tuple[Action, ...]
    failure: Failure | None = None
    instances: tuple[str, ...] = ()


def models(fleet: Fleet, beats: Mapping[str, NodeBeat], failures: Mapping[str, Failure]) -> tuple[ModelRow, ...]:
    """Every model that is not retired, or still has an instance; by name."""
    mine = belonging(fleet)
    running: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for request in fleet.requests.values():
        counted = waiting if request.instance is None else running
        counted[request.model] = counted.get(request.model, 0) + 1
    tints, rows = hues(fleet), []
    for model in sorted(fleet.models.values(), key=lambda m: m.model):
        own = mine.get(model.model, [])
        if model.retired and not own:
            continue
        state = state_of(fleet, beats, model, own)
        facts = model.facts
        row = ModelRow(
            model=model.model, aliases=model.spec.aliases, note=model.spec.note, engine=model.spec.engine,
            architecture=facts.architecture if facts else "", weight_bytes=facts.weight_bytes if facts else None,
            context_tokens=facts.context_tokens if facts else None,
            share=_share(model), configuration=facts.configuration if facts else None,
            hue=tints.get(facts.configuration, 0) if facts else 0, shared_with=_siblings(fleet, model), state=state,
            running=running.get(model.model, 0), waiting=waiting.get(model.model, 0),
            actions=_actions(fleet, model, state, own), failure=failures.get(model.model),
            instances=tuple(i.instance for i in own),
        )  # fmt: skip
        rows.append(row)
    return tuple(rows)


def belonging(fleet: Fleet) -> dict[str, list[Instance]]:
    """The instances by the model that each is shown with."""
    mine: dict[str, list[Instance]] = {}
    for instance in sorted(fleet.instances.values(), key=lambda i: i.instance):
        if (name := shown_model(instance)) is not None:
            mine.setdefault(name, []).append(instance)
    return mine


def _share(model: Model) -> str:
    if model.spec.gpus > 1:
        return f"{model.spec.gpus} devices"
    return share(model.spec.cells) if model.spec.cells else "auto"


def _siblings(fleet: Fleet, model: Model) -> tuple[str, ...]:
    if model.facts is None:
        return ()
    same = (m for m in fleet.models.values() if m.facts and m.facts.configuration == model.facts.configuration)
    return tuple(sorted(m.model for m in same if m.model != model.model and not m.retired))


def state_of(fleet: Fleet, beats: Mapping[str, NodeBeat], model: Model, own: list[Instance]) -> State:
    """The best that can be said: what serves, then what moves, then why nothing does. `own`: as `belonging` has them.

    The page, the REST API and the command line all have their words from here.
    """
    stands = [(standing(fleet, beats, instance), instance) for instance in own]
    for tone in ("up", "climb", "descend", "failed"):
        for found, _ in stands:
            if found.tone == tone:
                words = "retired, " + found.words if model.retired else found.words
                return State(tone=tone, words=words, since_ms=found.since_ms, message=found.why, progress=found.progress)
    if model.retired and not stands:
        return State(tone="cold", words="retired")
    if (no := model.rejection) is not None:
        numbers = f" It needs {size(no.need_bytes)}; the limit is {size(no.limit_bytes)}."
        told = not no.need_bytes or size(no.need_bytes) in no.message
        return State(tone="failed", words="rejected", message=no.message if told else no.message + numbers)
    if (back := model.set_back) is not None:
        times = "a start" if back.failures == 1 else f"{back.failures} starts"
        message = back.message if unopened(back.code) else f"{times} failed ({back.code}): {back.message}"
        return State(tone="failed", words="backing off", until_ms=back.retry_at_ms, message=message)
    if model.facts is None:
        progress = reported(beats, None, f"model:{model.model}")
        doing = "" if progress else "a node opens its source" if fleet.nodes else "waits for a node to join"
        return State(tone="climb", words="inspecting", since_ms=model.registered_ms, message=doing, progress=progress)
    if stands:
        found, instance = stands[0]
        return State(tone="sleep", words=found.words, since_ms=found.since_ms, message=off_disk(fleet, instance))
    if shares_sleeping(fleet, model):
        return State(tone="sleep", words="skeleton asleep", message="wakes from a skeleton it shares")
    on_disk = any(i.state == "ok" and i.configuration == model.facts.configuration for i in fleet.images.values())
    return State(tone="cold", words="cold", message="comes up from its skeleton on disk" if on_disk else "")


def shares_sleeping(fleet: Fleet, model: Model) -> bool:
    """Whether a skeleton that it can be mapped into sleeps."""
    configuration = model.facts.configuration if model.facts is not None else None
    return any(i.rung is Rung.SLEEP and i.configuration == configuration for i in fleet.instances.values())


def _actions(fleet: Fleet, model: Model, state: State, own: list[Instance]) -> tuple[Action, ...]:
    pending = {o.kind: o.operation for o in fleet.operations.values() if o.model == model.model}
    blocked = model.rejection is not None or model.set_back is not None
    is_up = any(i.rung is Rung.UP and i.model == model.model for i in own)
    load = ""
    if model.retired:
        load = "the model is retired"
    elif blocked and not is_up:
        load = f"it is {state.words}: use Retry"
    elif state.words == "inspecting":
        load = "a node is still opening its source"
    elif state.tone == "climb":
        load = "it is on its way up"
    elif is_up:
        load = "it is up"
    actions = [
        Action(verb="load", label="Load", why_not=load, operation=pending.get("load")),
        Action(verb="sleep", label="Sleep", why_not="" if is_up else "it is not up", operation=pending.get("sleep")),
        Action(verb="save", label="Save", why_not=_why_not_saved(fleet, own), operation=pending.get("save")),
        *_moves(fleet, model, own, pending.get("move")),
        Action(verb="stop", label="Stop", why_not="" if own else "it has no process", operation=pending.get("stop")),
    ]
    if any(device.kind == "gpu" for device in fleet.devices.values()):  # elsewhere it is never possible
        why_not = _why_not_checkpointed(fleet, own)
        checkpoint = Action(verb="checkpoint", label="Checkpoint", why_not=why_not, operation=pending.get("checkpoint"))
        actions.insert(2, checkpoint)
    if blocked or "retry" in pending:
        actions.insert(0, Action(verb="retry", label="Retry", operation=pending.get("retry")))
    return tuple(actions)


def _moves(fleet: Fleet, model: Model, own: list[Instance], pending: str | None) -> tuple[Action, ...]:
    """To the next device of its node; none where there is no other. REST and the command line take any.

    Whether there is room the decider says: a button that looked for it would be drawn anew with every grant.
    """
    here = next((i for i in own if i.rung is Rung.UP), None) or next(iter(own), None)
    around = sorted((d.name, d.device) for d in fleet.devices.values() if here is not None and d.node == here.node)
    others = [name for name, device in around if here is not None and device not in here.devices]
    if here is None or not others:
        return ()
    last = max((name for name, device in around if device in here.devices), default="")
    target = next((name for name in others if name > last), others[0])
    if model.retired or here.rung is not Rung.UP:
        why = "the model is retired" if model.retired else "it is not up"
    else:
        why = "a gang does not move" if here.ranks else why_still(fleet, here) or ""
    return (Action(verb=f"move:{target}", label=f"Move to {target}", why_not=why, operation=pending),)


def _why_not_checkpointed(fleet: Fleet, own: list[Instance]) -> str:
    """Why no instance of a model can be taken off its device; empty: one can."""
    there = [i for i in own if i.rung in (Rung.UP, Rung.SLEEP)]
    if not there:
        return "nothing of it is on a device"
    reasons = [why for i in there if (why := no_checkpoint(fleet, i)) is not None]
    return f"not possible here: {min(reasons)}" if len(reasons) == len(there) else ""


def _why_not_saved(fleet: Fleet, own: list[Instance]) -> str:
    """Why no instance of a model can be taken to disk; empty: one can."""
    there = [i for i in own if i.rung in (Rung.UP, Rung.SLEEP, Rung.CHECKPOINT)]
    if not there:
        return "no skeleton of it is there"
    if all(i.ranks for i in there):
        return "a gang is not saved to disk"
    reasons = {fleet.nodes[i.node].no_images for i in there if i.node in fleet.nodes}
    return f"not possible here: {min(reasons)}" if all(reasons) and reasons else ""
