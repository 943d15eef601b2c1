"""What workers report of their instances. A repeated report changes nothing; a stale one is refused."""

from collections.abc import Iterable

from controlplane import unopened
from controlplane.commands import (
    ReportCheckpointed,
    ReportEnded,
    ReportFailed,
    ReportSaved,
    ReportSlept,
    ReportUp,
)
from controlplane.decisions import descent, endings, operations
from controlplane.decisions.draft import Draft
from controlplane.decisions.limits import CLIMBS, MEASURED_ANEW, back_off_ms
from controlplane.decisions.schedule import advance
from controlplane.decisions.verdict import fail, loads
from controlplane.events import (
    GrantReturned,
    InstanceCheckpointed,
    InstanceEnded,
    InstanceFailed,
    InstanceSaved,
    InstanceSlept,
    InstanceUp,
    ModelCleared,
    ModelSetBack,
    SkeletonMeasured,
)
from controlplane.fleet.members import REBUILD, Directive, Instance
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung


def up(draft: Draft, report: ReportUp) -> None:
    """It serves. Reported again with another endpoint (its frontend was restarted), it is recorded again."""
    instance, directive = _answered(draft, report, Rung.UP)
    if (report.model, report.revision, report.grant) != (directive.model, directive.revision, directive.grant):
        raise _stale(report)
    if instance.directive_settled and (instance.endpoint, instance.pid) == (report.endpoint, report.pid):
        return
    first, left = not instance.directive_settled, instance.grants if instance.moving_to is not None else ()
    draft.emit(
        InstanceUp(
            node=report.node, instance=report.instance, directive=report.directive, model=report.model,
            revision=report.revision, weight_set=report.weight_set, grant=report.grant, endpoint=report.endpoint,
            pid=report.pid, took_ms=report.took_ms, bytes_mapped=report.bytes_mapped, bytes_used=report.bytes_used,
            check=report.check, image=report.image, graphs=report.graphs, graphs_again=report.graphs_again, steps=report.steps,
        ),
        operation=directive.operation, because=directive.number,
    )  # fmt: skip
    if not first:
        return
    _return(draft, [number for number in left if number != report.grant], directive.operation)  # what it has moved away from
    model = draft.fleet.models.get(report.model)
    if model is not None and model.set_back is not None:
        draft.emit(ModelCleared(model=report.model), operation=directive.operation)
    configuration = draft.fleet.configurations.get(instance.configuration)
    if configuration and configuration.skeleton_bytes is None and model and model.facts:
        _measured(draft, instance, report.bytes_used - report.bytes_mapped - model.facts.kv_bytes, directive)
    _settled(draft)


def slept(draft: Draft, report: ReportSlept) -> None:
    elsewhere = (Rung.UP, Rung.CHECKPOINT, Rung.SAVED, Rung.SLEEP)  # asleep, its image could not be made anew
    instance, directive = _answered(draft, report, *(elsewhere if report.code else (Rung.SLEEP,)))
    if instance.directive_settled:
        return
    if report.code and directive.rung is Rung.SLEEP and directive.code != REBUILD:
        raise _stale(report)
    number = directive.number
    if report.code:  # it could not get there and has gone back to sleep by itself: as if it had been told to
        number = descent.direct(
            draft, instance, Rung.SLEEP, report.code, operation=directive.operation, because=directive.number
        )  # fmt: skip
    draft.emit(
        InstanceSlept(
            node=report.node, instance=report.instance, directive=number, pid=report.pid, took_ms=report.took_ms,
            bytes_used=report.bytes_used, steps=report.steps, code=report.code, message=report.message,
        ),
        operation=directive.operation, because=number,
    )  # fmt: skip
    _return_grant(draft, instance, directive.operation)
    _measured(draft, instance, report.bytes_used, directive)
    if report.code:
        _fell_short(draft, directive, report.code, f"{report.message}; its skeleton sleeps on")
    _settled(draft)


def checkpointed(draft: Draft, report: ReportCheckpointed) -> None:
    instance, directive = _answered(draft, report, *((Rung.UP, Rung.SAVED, Rung.SLEEP) if report.code else (Rung.CHECKPOINT,)))
    if instance.directive_settled:
        return
    number = directive.number
    if report.code:  # its device had no room for it, so it stays off it: as if it had been told to
        number = descent.direct(
            draft, instance, Rung.CHECKPOINT, report.code, operation=directive.operation, because=directive.number
        )  # fmt: skip
    draft.emit(
        InstanceCheckpointed(
            node=report.node, instance=report.instance, directive=number, pid=report.pid, took_ms=report.took_ms,
            host_bytes=report.host_bytes, image=report.image, steps=report.steps, code=report.code, message=report.message,
        ),
        operation=directive.operation, because=number,
    )  # fmt: skip
    _return_grant(draft, instance, directive.operation)
    if report.code:
        _fell_short(draft, directive, report.code, f"{report.message}; its skeleton waits off its device")
    _settled(draft)


def _fell_short(draft: Draft, directive: Directive, code: str, message: str) -> None:
    """It could not get to where it was directed, and is well: only what was asked of it has failed."""
    if directive.rung is Rung.UP and directive.model is not None:
        set_back(draft, directive.model, directive.revision, code=code, message=message, operation=directive.operation)
    asked = draft.fleet.operations.get(directive.operation or "")
    if asked is not None and asked.kind in ("checkpoint", "save", "move"):
        fail(draft, asked, code, message)


def saved(draft: Draft, report: ReportSaved) -> None:
    instance, directive = _answered(draft, report, Rung.SAVED)
    if instance.directive_settled:
        return
    draft.emit(
        InstanceSaved(
            node=report.node, instance=report.instance, directive=report.directive, image=report.image, took_ms=report.took_ms,
            steps=report.steps,
        ),
        operation=directive.operation, because=directive.number,
    )  # fmt: skip
    _return_grant(draft, instance, directive.operation)
    _settled(draft)


def ended(draft: Draft, report: ReportEnded) -> None:
    """Cold and gone. A later order to go cold than the one that the worker answers asks for the same."""
    instance = draft.fleet.instances.get(report.instance)
    if instance is None:
        return
    directive = instance.directive
    if directive is None or directive.rung is not Rung.COLD or instance.node != report.node:
        raise _stale(report)
    event = InstanceEnded(
        node=report.node, instance=report.instance, directive=report.directive, took_ms=report.took_ms
    )  # fmt: skip
    draft.emit(event, operation=directive.operation, because=directive.number)
    _return_grant(draft, instance, directive.operation)
    operations.kept_nowhere(draft, instance, "superseded", f"{instance.instance} was ended first")
    _settled(draft)


def failed(draft: Draft, report: ReportFailed) -> None:
    """It is gone, whatever it was told last. A failed start sets its model back; a death of what was up does not."""
    instance = draft.fleet.instances.get(report.instance)
    if instance is None:
        return
    directive = instance.directive
    if instance.node != report.node or directive is None or report.directive > directive.number:
        raise _stale(report)
    lose(draft, instance, step=report.step, code=report.code, message=report.message)
    if directive.rung is Rung.UP and not instance.directive_settled and directive.model is not None:
        set_back(
            draft, directive.model, directive.revision, code=report.code, message=report.message, operation=directive.operation
        )
    _settled(draft)


def lose(draft: Draft, instance: Instance, *, step: str, code: str, message: str) -> None:
    """Record the end of an instance that was not asked to end."""
    directive = instance.directive
    operation = directive.operation if directive else None
    draft.emit(
        InstanceFailed(
            node=instance.node, instance=instance.instance, directive=directive.number if directive else 0, rung=instance.rung,
            step=step, code=code, message=message,
        ),
        operation=operation, because=directive.number if directive else None,
    )  # fmt: skip
    gone(draft, instance, code=code, message=message)


def gone(draft: Draft, instance: Instance, *, code: str, message: str) -> None:
    """What it held is free. What was asked of it has failed; but a stop has what it wanted, and a load may find another."""
    operation = instance.directive.operation if instance.directive else None
    _return_grant(draft, instance, operation)
    asked = draft.fleet.operations.get(operation or "")
    if asked is not None and asked.kind in ("sleep", "move"):
        fail(draft, asked, code, message)
    operations.kept_nowhere(draft, instance, code, message)


def set_back(draft: Draft, name: str, revision: int, *, code: str, message: str, operation: str | None = None) -> None:
    """A start failed: back off, and end those who have seen enough failures. An older revision's failure counts for nobody."""
    model = draft.fleet.models.get(name)
    if model is None or model.retired or model.revision != revision:
        return
    failures = (model.set_back.failures if model.set_back else 0) + 1
    message = unopened.named(model.spec, code, message)
    retry_at = draft.now + back_off_ms(failures)
    draft.emit(
        ModelSetBack(model=name, failures=failures, retry_at_ms=retry_at, code=code, message=message), operation=operation
    )
    for waiting in draft.fleet.waiting.get(name, ()):
        request = draft.fleet.requests[waiting]
        if request.failed_climbs >= CLIMBS:
            endings.fail(draft, request, "load_failed", unopened.failed(name, failures, code, message))
    for load in loads(draft.fleet, name):
        fail(draft, load, code, message)


def _answered(
    draft: Draft, report: ReportUp | ReportSlept | ReportCheckpointed | ReportSaved, *rungs: Rung
) -> tuple[Instance, Directive]:
    """The instance and the directive that the report answers. Raises Refused (STALE) when that is not its last one."""
    instance = draft.fleet.instances.get(report.instance)
    directive = instance.directive if instance else None
    if instance is None or directive is None or instance.node != report.node:
        raise _stale(report)
    if directive.number != report.directive or directive.rung not in rungs:
        raise _stale(report)
    return instance, directive


def _stale(report: ReportUp | ReportSlept | ReportCheckpointed | ReportSaved | ReportEnded | ReportFailed) -> Refused:
    message = f"directive {report.directive} of {report.instance} has been superseded, or the instance is gone"
    return Refused(Code.STALE, message, instance=report.instance, directive=report.directive)


def _return_grant(draft: Draft, instance: Instance, operation: str | None) -> None:
    """All that it holds: of each rank, and where it was moving to."""
    _return(draft, instance.grants, operation)


def _return(draft: Draft, numbers: Iterable[int], operation: str | None) -> None:
    for number in numbers:
        if (grant := draft.fleet.grants.get(number)) is not None:
            event = GrantReturned(node=grant.node, device=grant.device, instance=grant.instance, grant=grant.number)
            draft.emit(event, operation=operation)


def _measured(draft: Draft, instance: Instance, size: int, directive: Directive) -> None:
    """Correct the configuration's skeleton, when it is known and the new figure is another one. A gang has one a rank."""
    size //= max(1, len(instance.ranks))
    known = draft.fleet.configurations.get(instance.configuration)
    if known is None or size <= 0:
        return
    before = known.skeleton_bytes
    if before is None or abs(size - before) > MEASURED_ANEW * before:
        event = SkeletonMeasured(configuration=instance.configuration, size_bytes=size)
        draft.emit(event, operation=directive.operation)


def _settled(draft: Draft) -> None:
    """Something stands still again: finish the operations that asked for it, and move the queue on."""
    advance(draft)
    operations.pursue(draft)
