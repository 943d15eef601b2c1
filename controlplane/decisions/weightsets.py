"""What workers report of the weight sets in their pools. A repeated report changes nothing."""

from controlplane.commands import ReportDropped, ReportStaged
from controlplane.decisions.draft import Draft
from controlplane.decisions.schedule import advance
from controlplane.events import WeightsDropped, WeightsStaged


def staged(draft: Draft, report: ReportStaged) -> None:
    known = draft.fleet.weights.get(f"{report.node}/{report.weight_set}")
    if known is not None and not known.dismissed and (report.model, report.revision) in known.models:
        return
    draft.emit(
        WeightsStaged(
            node=report.node, weight_set=report.weight_set, model=report.model, revision=report.revision,
            size_bytes=report.size_bytes, took_ms=report.took_ms, read_bytes=report.read_bytes,
        )
    )  # fmt: skip
    advance(draft)


def dropped(draft: Draft, report: ReportDropped) -> None:
    if f"{report.node}/{report.weight_set}" not in draft.fleet.weights:
        return
    draft.emit(WeightsDropped(node=report.node, weight_set=report.weight_set, code=report.code))
    advance(draft)
