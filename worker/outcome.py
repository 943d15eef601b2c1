"""What is said of a directive that was reached: one report, with what was measured on the way."""

from controlplane.commands import ReportCheckpointed, ReportEnded, ReportSaved, ReportSlept, ReportUp
from controlplane.events import Step
from controlplane.rungs import Rung
from worker import processes
from worker.desired import Wanted
from worker.failure import StepFailed
from worker.local import LocalInstance
from worker.occupancy import used_bytes
from worker.report import Report


def outcome(
    local: LocalInstance, wanted: Wanted, rung: Rung, *, took_ms: int, steps: tuple[Step, ...], check: str,
    failure: StepFailed | None,
) -> Report:  # fmt: skip
    """`steps` and `check`: what was done, and what the known answer showed. `failure`: why it is only there."""
    d = wanted.directive
    assert d is not None
    node, instance, number = local.site.plane.node, wanted.instance, d.number
    if rung is Rung.COLD:
        return ReportEnded(node=node, instance=instance, directive=number, took_ms=took_ms)
    if rung is Rung.SAVED:
        image = local.seen.kept or ""
        return ReportSaved(node=node, instance=instance, directive=number, image=image, took_ms=took_ms, steps=steps)
    record, state = local.record, local.engine_state
    pid = record.engine.pid if record.engine else 0
    if rung is Rung.CHECKPOINT:
        return ReportCheckpointed(
            node=node, instance=instance, directive=number, pid=pid, took_ms=took_ms,
            host_bytes=local.host_bytes or processes.private_bytes(pid), image=local.restored_from, steps=steps,
            code=failure.code if failure else "", message=failure.message if failure else "",
        )  # fmt: skip
    used = used_bytes(state) if state else 0
    if rung is Rung.SLEEP:
        return ReportSlept(
            node=node, instance=instance, directive=number, pid=pid, took_ms=took_ms, bytes_used=used, steps=steps,
            code=failure.code if failure else "", message=failure.message if failure else "",
        )  # fmt: skip
    assert d.model is not None
    return ReportUp(
        node=node, instance=instance, directive=number, model=d.model, revision=d.revision,
        weight_set=local.seen.attached or "", grant=d.grant or 0, endpoint=local.frontend.endpoint(record.port), pid=pid,
        took_ms=took_ms, bytes_mapped=state.bytes_mapped if state else 0, bytes_used=used, check=check,
        image=local.restored_from, graphs=state.graphs if state else None, graphs_again=state.graphs_again if state else 0,
        steps=steps,
    )  # fmt: skip
