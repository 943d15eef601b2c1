"""What operators ask for: load, sleep, checkpoint, save, stop, retry (and move: `moves`).

Each is an operation until the state is as asked, or can't be.
"""

from controlplane import ids
from controlplane.commands import Checkpoint, Load, Retry, Save, Sleep, Stop
from controlplane.decisions import descent, hostroom, images, moves, standing
from controlplane.decisions.admission import check_servable, known
from controlplane.decisions.draft import Draft
from controlplane.decisions.schedule import advance
from controlplane.decisions.verdict import fail, loads, succeed
from controlplane.events import ModelCleared, OperationRequested
from controlplane.fleet.callers import Operation
from controlplane.fleet.members import Instance
from controlplane.fleet.reach import NO_CUDA, holds_gpu, no_checkpoint, without_gpu
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung


def load(draft: Draft, command: Load) -> None:
    """Bring it up. It holds no place for ever: idle again, it can be evicted like any other."""
    model = known(draft.fleet, command.model)
    instance = standing.serving(draft.fleet, model, revision=model.revision)
    if instance is None:
        check_servable(draft.fleet, model, draft.now)
    operation = _open(draft, "load", model.model, instance)
    if instance is not None:
        succeed(draft, operation, "was up already")
    else:
        advance(draft)


def sleep(draft: Draft, command: Sleep) -> None:
    """Down to the skeleton: running requests are drained by the worker, new ones wait and bring the model up again."""
    _descend(draft, command.model, "sleep", "was not up")


def checkpoint(draft: Draft, command: Checkpoint) -> None:
    """Off the device altogether: the process stays on the host, and comes back from there."""
    model = known(draft.fleet, command.model)
    if not holds_gpu(model.spec.engine, model.spec.arguments):
        raise Refused(Code.NOT_AVAILABLE, without_gpu(model.spec.engine), reason=NO_CUDA, model=model.model)
    for instance in draft.fleet.instances.values():
        if instance.model == model.model and (why := no_checkpoint(draft.fleet, instance)) is not None:
            raise Refused(Code.NOT_AVAILABLE, why, reason=NO_CUDA, instance=instance.instance)
        if _goes_off(instance, model.model) and (why := hostroom.lacking(draft.fleet, instance)) is not None:
            raise Refused(Code.NOT_AVAILABLE, why, reason=hostroom.NO_HOST_MEMORY, instance=instance.instance)
    _descend(draft, command.model, "checkpoint", "nothing of it was on a device")


def _goes_off(instance: Instance, model: str) -> bool:
    return instance.model == model and instance.rung in (Rung.UP, Rung.SLEEP)


def save(draft: Draft, command: Save) -> None:
    """Down to disk: no process is left, and the next request brings it back from there."""
    model = known(draft.fleet, command.model)
    for instance in draft.fleet.instances.values():
        if instance.model == model.model and (why := images.hindrance(draft.fleet, instance)) is not None:
            raise Refused(Code.NOT_AVAILABLE, why[1], reason=why[0], instance=instance.instance)
    _descend(draft, command.model, "save", "no skeleton was there that could be saved")


def stop(draft: Draft, command: Stop) -> None:
    """Down to nothing. It breaks into a climb as well."""
    _descend(draft, command.model, "stop", "no process was there")


def retry(draft: Draft, command: Retry) -> None:
    """Forget the failure; if something waits, start at once."""
    model = known(draft.fleet, command.model)
    operation = _open(draft, "retry", model.model, None)
    if model.set_back is None and model.rejection is None:
        succeed(draft, operation, "nothing had failed")
        return
    draft.emit(ModelCleared(model=model.model), operation=operation.operation)
    succeed(draft, operation, "cleared; it starts when it is asked for")
    advance(draft)


def pursue(draft: Draft) -> None:
    """Direct what open sleeps, saves and stops still have to direct, and end those that have what they asked for."""
    for operation in sorted(draft.fleet.operations.values(), key=lambda o: o.order):
        if operation.kind not in ("sleep", "checkpoint", "save", "stop"):
            continue
        open_still = False
        for instance in list(draft.fleet.instances.values()):
            directive = instance.directive
            if directive is None:
                continue
            if directive.operation == operation.operation:
                open_still = open_still or not instance.directive_settled
            elif directive.number < operation.order and concerned(instance, operation):
                open_still = True
                _direct(draft, instance, operation)
                if operation.operation not in draft.fleet.operations:
                    break
        if not open_still:
            succeed(draft, operation)
    for operation in [o for o in draft.fleet.operations.values() if o.kind == "move"]:
        moves.pursue(draft, operation)


def concerned(instance: Instance, operation: Operation) -> bool:
    """Whether the instance serves, climbs for or (for a stop) last served the operation's model."""
    directive = instance.directive
    bound_for = directive.model if directive is not None and directive.rung is Rung.UP else None
    if not instance.directive_settled and bound_for is not None:
        return bound_for == operation.model
    if instance.model != operation.model:
        return False
    match operation.kind:
        case "stop":
            return True
        case "save":
            return instance.rung in (Rung.UP, Rung.SLEEP, Rung.CHECKPOINT)
        case "checkpoint":
            return instance.rung in (Rung.UP, Rung.SLEEP)
        case _:
            return instance.rung is Rung.UP


def kept_nowhere(draft: Draft, instance: Instance, code: str, message: str) -> None:
    """One that has ended was to be kept, off its device or on disk, and had not got there. If others are, it may have been
    ending before that was asked for."""
    for asked in sorted(draft.fleet.operations.values(), key=lambda o: o.order):
        if asked.kind not in ("checkpoint", "save"):
            continue
        alone = not any(_directed(i, asked) or concerned(i, asked) for i in draft.fleet.instances.values())
        if _directed(instance, asked) or (alone and concerned(instance, asked)):
            fail(draft, asked, code, message)


def _directed(instance: Instance, operation: Operation) -> bool:
    return instance.directive is not None and instance.directive.operation == operation.operation


def _direct(draft: Draft, instance: Instance, operation: Operation) -> None:
    """A sleep waits until a climb has arrived; a stop does not, but leaves alone what is ending anyway."""
    stopping = operation.kind == "stop"
    ending = instance.directive is not None and instance.directive.rung is Rung.COLD
    if ending or not (stopping or instance.directive_settled):
        return
    if operation.kind == "save":
        images.save(draft, instance, "operator", operation=operation.operation, because=operation.order)
        return  # if there is no place for it now, the next tick asks again
    if operation.kind == "checkpoint" and (why := hostroom.lacking(draft.fleet, instance)) is not None:
        fail(draft, operation, hostroom.NO_HOST_MEMORY, why)  # another has taken the room since it was asked for
        return
    rung = Rung.COLD if stopping else Rung.CHECKPOINT if operation.kind == "checkpoint" else Rung.SLEEP
    descent.direct(draft, instance, rung, "operator", operation=operation.operation, because=operation.order)


def _descend(draft: Draft, name: str, kind: str, nothing: str) -> None:
    model = known(draft.fleet, name)
    before = len(draft.fleet.instances)
    operation = _open(draft, kind, model.model, None)
    for other in loads(draft.fleet, model.model):
        fail(draft, other, "superseded", f"a later {kind} of {model.model} took its place")
    if not before or not any(concerned(instance, operation) for instance in draft.fleet.instances.values()):
        succeed(draft, operation, nothing)
        return
    pursue(draft)
    advance(draft)


def _open(draft: Draft, kind: str, model: str, instance: Instance | None) -> Operation:
    operation = draft.new_id(ids.OPERATION)
    draft.emit(
        OperationRequested(operation=operation, kind=kind, model=model, instance=instance.instance if instance else None),
        operation=operation,
    )
    return draft.fleet.operations[operation]
