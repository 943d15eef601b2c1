"""Where an instance stays when it can't get to where it is directed and nothing of it was harmed.

A skeleton costs half a minute to start: it is not thrown away for want of room that somebody may give back in a moment.
"""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from controlplane.fleet import DISK_FULL, ENGINE_OUTDATED, MOVE, REBUILD
from controlplane.rungs import NOT_CHECKPOINTABLE, Rung
from worker.desired import Wanted
from worker.engines.messages import Health
from worker.failure import StepFailed
from worker.local import LocalInstance
from worker.moves import EngineState, StepName

NO_ROOM: Final = frozenset({"device_full", "no_memory", "no_room"})
"""Failures of a wake after which the engine is as it was before."""
POOL_FULL: Final = frozenset({"over_budget", "no_room"})
"""Failures of a staging: the engine has no part in it."""
CAN_STAY: Final = frozenset({"operator", "idle", MOVE, REBUILD})
"""Codes of directives off a device that nobody needs at once: without memory of the host, or room on the disk, or if no image
can be made of it, the engine may stay as it is."""


class Ledge(Struct, frozen=True):
    """The directive that could not be reached, where the instance stays instead, and why."""

    directive: int | None
    rung: Rung
    failure: StepFailed

    def aim(self, wanted: Wanted) -> Wanted:
        """What is wanted, as far as it can be."""
        assert wanted.directive is not None
        model = wanted.directive.model if self.rung is Rung.SLEEP else None  # at `checkpoint` it waits for nothing
        code = self.failure.code  # no longer to make an image anew, say
        return replace(wanted, directive=replace(wanted.directive, rung=self.rung, model=model, code=code))


def stays_unsaved(wanted: Wanted) -> bool:
    """Whether an engine whose image can't be made, by no fault of its own, is left as it was."""
    return wanted.directive is not None and wanted.directive.code in CAN_STAY


async def ledge(local: LocalInstance, wanted: Wanted, step: StepName, failure: StepFailed) -> Ledge | None:
    """None: the failure is the instance's end."""
    d = wanted.directive
    if d is None or local.lost is not None:
        return None
    if failure.code == "no_device_memory" and local.seen.engine is EngineState.CHECKPOINTED:
        return Ledge(d.number, Rung.CHECKPOINT, failure)  # looked for before the driver was asked anything
    no_disk = failure.code in DISK_FULL and step is StepName.BUILD
    if (no_disk or failure.code == ENGINE_OUTDATED) and stays_unsaved(wanted):
        match local.seen.engine:
            case EngineState.CONNECTED:
                return Ledge(d.number, Rung.SLEEP, failure)
            case EngineState.CHECKPOINTED:
                return Ledge(d.number, Rung.CHECKPOINT, failure)
            case _:
                return None
    if local.seen.engine is not EngineState.CONNECTED or failure.code not in NO_ROOM | POOL_FULL | {NOT_CHECKPOINTABLE}:
        return None
    if step is StepName.STAGE and d.rung is not Rung.UP:  # for the proof of an image
        return Ledge(d.number, Rung.SLEEP, failure) if d.code in CAN_STAY and failure.code in POOL_FULL else None
    if failure.code not in NO_ROOM | {NOT_CHECKPOINTABLE}:
        return None
    if step in (StepName.CHECKPOINT, StepName.BUILD):
        return Ledge(d.number, Rung.SLEEP, failure) if d.code in CAN_STAY else None
    if d.rung is not Rung.UP or d.code == MOVE or not local.seen.own_layout:
        return None  # one that moves may be on either device by now
    try:
        local.take(await local.tell(Health(), local.site.deadlines.attach))
    except StepFailed:
        return None
    return Ledge(d.number, Rung.SLEEP, failure)
