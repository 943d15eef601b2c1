"""Why an instance can't get to where it is directed: code and sentence, for the report of its end."""

from controlplane.rungs import Rung
from worker.desired import Wanted
from worker.local import LocalInstance
from worker.moves import EngineState, Goal, Observed


def lost(local: LocalInstance, wanted: Wanted | None, rung: Rung, *, working: bool) -> tuple[str, str] | None:
    """None: it can, or it is not known yet. `working`: a step runs, which may change that."""
    seen = local.seen
    if rung is Rung.SAVED and seen.kept is not None:
        return None  # it is on disk: its process was to end in any case
    if local.lost is not None:
        return local.lost
    if seen.engine is EngineState.DEAD:
        return ("engine_died" if seen.holder else "holder_died"), "it had ended when this worker looked"
    if rung is Rung.SLEEP and seen.engine is EngineState.ABSENT:
        return "lost", "there is no process that could be put to sleep"
    if rung is Rung.CHECKPOINT and seen.engine is EngineState.ABSENT and not working:
        return _unrestorable(wanted, seen)
    if rung is Rung.SAVED and seen.sought and seen.kept is None and not working:
        return _unsavable(wanted, seen)
    return None


def _unsavable(wanted: Wanted | None, seen: Observed) -> tuple[str, str] | None:
    """Why a skeleton that is not on disk can't be put there now; None: it can."""
    d = wanted.directive if wanted is not None else None
    if seen.engine not in (EngineState.CONNECTED, EngineState.CHECKPOINTED):
        return "lost", "there is no process that could be saved, and no image of it"
    if d is None or (d.grant is None and seen.grant is None):
        return "no_image", "its image can't be used any more, and it was given no place to prove another one"
    return None


def _unrestorable(wanted: Wanted | None, seen: Observed) -> tuple[str, str] | None:
    """Why nothing can be brought to `checkpoint`: there is neither a process nor an image; None: it can, or is looked for."""
    d = wanted.directive if wanted is not None else None
    if d is None or d.model is None:
        return "lost", "there is no process that could be taken off its device"
    if seen.prepared == Goal(d.model, d.revision) and seen.image is None and seen.holder:
        return "no_image", "there is no image of it that could be used"
    return None
