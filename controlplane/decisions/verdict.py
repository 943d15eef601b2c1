"""Verdicts: on open operations, and on models that can't be served."""

from controlplane.decisions import endings
from controlplane.decisions.draft import Draft
from controlplane.decisions.needs import CannotFit
from controlplane.events import ModelRejected, OperationFailed, OperationSucceeded
from controlplane.fleet.callers import Operation
from controlplane.fleet.members import Model
from controlplane.fleet.state import Fleet


def loads(fleet: Fleet, model: str | None = None) -> list[Operation]:
    return [o for o in fleet.operations.values() if o.kind == "load" and model in (None, o.model)]


def give_up(draft: Draft, model: Model, code: str, message: str) -> None:
    """Nobody who waits for the model will be served: end them, with the reason."""
    endings.fail_waiting(draft, model.model, code, message)
    for load in loads(draft.fleet, model.model):
        fail(draft, load, code, message)


def reject(draft: Draft, model: Model, code: str, message: str, unfit: CannotFit | None = None) -> None:
    """The model can't be served as it is: say so, and end what waits for it."""
    need, limit = (unfit.need_bytes, unfit.limit_bytes) if unfit else (0, 0)
    draft.emit(
        ModelRejected(
            model=model.model, revision=model.revision, code=code, message=message, need_bytes=need, limit_bytes=limit
        )
    )
    give_up(draft, model, code, message)


def succeed(draft: Draft, operation: Operation, note: str = "") -> None:
    draft.emit(
        OperationSucceeded(
            operation=operation.operation, kind=operation.kind, model=operation.model, instance=operation.instance,
            took_ms=draft.now - operation.requested_ms, note=note,
        ),
        operation=operation.operation,
    )  # fmt: skip


def fail(draft: Draft, operation: Operation, code: str, message: str) -> None:
    draft.emit(
        OperationFailed(
            operation=operation.operation, kind=operation.kind, model=operation.model, instance=operation.instance,
            code=code, message=message,
        ),
        operation=operation.operation,
    )  # fmt: skip
