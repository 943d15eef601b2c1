"""The way down: an instance is told to leave its device, or to end."""

from controlplane.decisions.draft import Draft
from controlplane.events import InstanceDirected
from controlplane.fleet.members import Instance
from controlplane.rungs import Rung


def direct(
    draft: Draft, instance: Instance, rung: Rung, code: str, *, victim_of: str | None = None, operation: str | None = None,
    because: int | None = None,
) -> int:  # fmt: skip
    """Returns the directive's number. To disk is `images.save`: that may take a place first."""
    return draft.emit(
        InstanceDirected(
            node=instance.node, instance=instance.instance, rung=rung, grant=instance.grant, code=code, victim_of=victim_of
        ),
        operation=operation, because=because,
    ).position  # fmt: skip
