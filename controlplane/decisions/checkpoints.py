"""The rung `checkpoint`: the process stays, on the host alone, and nothing of it is on a device."""

from controlplane.decisions.draft import Draft
from controlplane.events import InstanceDirected
from controlplane.fleet.members import Instance
from controlplane.rungs import Rung


def direct(
    draft: Draft, instance: Instance, code: str, *, victim_of: str | None = None, operation: str | None = None,
    because: int | None = None,
) -> None:  # fmt: skip
    draft.emit(
        InstanceDirected(
            node=instance.node, instance=instance.instance, rung=Rung.CHECKPOINT, grant=instance.grant, code=code,
            victim_of=victim_of,
        ),
        operation=operation, because=because,
    )  # fmt: skip
