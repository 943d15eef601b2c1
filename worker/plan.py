"""What to do next for one instance: a pure function of what should be and what is.

Level-triggered: it is asked again after every step, and does not care how things came to be as they are. Moves that
it names together may run at the same time. An empty answer means: there.
"""

from controlplane.fleet import REBUILD, Directive
from controlplane.rungs import Rung
from worker.desired import Wanted
from worker.moves import EngineState, Goal, Move, Observed, Served, StepName


def plan(wanted: Wanted | None, seen: Observed) -> tuple[Move, ...]:
    """Return what to do next: moves that may run at once; none: the directive is reached. `wanted` None: it must go."""
    if wanted is not None and wanted.directive is None:
        return ()
    match wanted.directive.rung if wanted and wanted.directive else Rung.COLD:
        case Rung.UP:
            assert wanted is not None
            return _climb(wanted, seen)
        case Rung.SLEEP:
            assert wanted is not None
            return _to_sleep(wanted, seen)
        case Rung.COLD:
            return _to_cold(seen)
        case Rung.SAVED:
            assert wanted is not None
            return _to_saved(wanted, seen)
        case Rung.CHECKPOINT:
            assert wanted is not None
            return _to_checkpoint(wanted, seen)


def _climb(wanted: Wanted, seen: Observed) -> tuple[Move, ...]:
    d = wanted.directive
    assert d is not None
    assert d.model is not None
    assert d.grant is not None
    goal = Goal(d.model, d.revision)
    mapped = seen.awake and seen.attached is not None and seen.woken_for == goal and seen.grant == d.grant
    if mapped and seen.frontend and seen.serving == Served(d.model, d.revision, d.grant):
        return ()
    moves = [*_ready(seen, goal, mapped=mapped), *_skeleton(seen, goal, d.grant)]
    if not wanted.gang:
        moves += _fill(seen, goal, d.grant)
    if moves:
        return tuple(moves)
    if _elsewhere(wanted, seen):
        return tuple(_leave(seen)) or (Move(StepName.CHECKPOINT if seen.verified else StepName.VERIFY),)
    if not mapped and (moves := _remap(seen, goal, d.grant)):
        return tuple(moves)
    if not seen.checked:
        return (Move(StepName.CHECK, goal),)
    return (Move(StepName.SERVE, goal, d.grant),)


def _elsewhere(wanted: Wanted, seen: Observed) -> bool:
    """Whether its skeleton is on another GPU than its cells: off that one then, and from there to the other."""
    grant = wanted.grant
    return grant is not None and not wanted.gang and seen.device not in (None, grant.device)


def _ready(seen: Observed, goal: Goal, *, mapped: bool) -> list[Move]:
    if seen.prepared != goal:
        return [Move(StepName.PREPARE, goal)]
    if not mapped and not seen.own_layout and not _staged(seen, goal):
        return [Move(StepName.STAGE, goal)]
    return []


def _staged(seen: Observed, goal: Goal) -> bool:
    return seen.staged is not None and seen.staged[0] == goal


def _skeleton(seen: Observed, goal: Goal, grant: int) -> list[Move]:
    moves = [] if seen.frontend else [Move(StepName.START_FRONTEND)]
    if not seen.holder:
        moves.append(Move(StepName.START_HOLDER))
    elif seen.engine is EngineState.ABSENT:
        if seen.prepared == goal:
            start = Move(StepName.RESTORE if seen.image else StepName.START_ENGINE)
            moves += (seen.own_layout and _cells(seen, grant)) or [start]
    elif seen.engine is EngineState.STARTING:
        moves.append(Move(StepName.CONNECT))
    elif seen.engine is EngineState.CHECKPOINTED:
        moves += _cells(seen, grant) or [Move(StepName.CUDA_RESTORE, grant=grant)]
    return moves


def _fill(seen: Observed, goal: Goal, grant: int) -> list[Move]:
    """The bytes travel while the process comes back. Not before the cells are this grant's, and not for a gang: its ranks
    capture their graphs anew, beside which the copy is short."""
    coming = seen.engine is EngineState.CHECKPOINTED or (seen.engine is EngineState.ABSENT and seen.image is not None)
    if not (coming and seen.own_layout and seen.grant == grant and seen.staged is not None and seen.staged[0] == goal):
        return []
    return [Move(StepName.FILL, goal, grant)] if seen.filled != seen.staged[1] else []


def _cells(seen: Observed, grant: int) -> list[Move]:
    """From whichever grant's cells to this one's; the engine uses none by now."""
    if seen.grant == grant:
        return []
    if seen.grant is None:
        return [Move(StepName.TAKE_CELLS, grant=grant)]
    return [Move(StepName.VERIFY) if not seen.verified else Move(StepName.DROP_CELLS)]


def _remap(seen: Observed, goal: Goal, grant: int) -> list[Move]:
    """From whatever is mapped under whichever grant to this goal's weights under this one."""
    if not _staged(seen, goal):  # an own layout that the pool lacks: the skeleton brings it, asleep, on its cells
        keeps = seen.grant == grant and seen.attached is None
        return _leave(seen, detach=not keeps) or _cells(seen, grant) or [Move(StepName.DEPOSIT, goal)]
    assert seen.staged is not None
    right = seen.attached == seen.staged[1] and seen.grant == grant
    if seen.own_layout and seen.awake and seen.grant == grant:
        return _switch(seen, goal, right=right)
    if seen.attached is not None and not (right and (not seen.awake or seen.woken_for == goal)):
        return _leave(seen, detach=not right)
    if moves := (seen.loaded and seen.grant != grant and _leave(seen)) or _cells(seen, grant):
        return moves
    if seen.attached is None:
        return [Move(StepName.ATTACH, goal)]
    if not seen.awake:
        return [Move(StepName.WAKE, goal)]
    return []


def _switch(seen: Observed, goal: Goal, *, right: bool) -> list[Move]:
    """Other weights into an engine that stays awake, once nothing runs."""
    if moves := _quiet(seen):
        return moves
    return [Move(StepName.WAKE if right else StepName.ATTACH, goal)]


def _leave(seen: Observed, *, detach: bool = True) -> list[Move]:
    """Out of `up`: admit nothing more, let what runs end, give the memory back."""
    if moves := _quiet(seen):
        return moves
    if seen.awake:
        return [Move(StepName.SLEEP)]
    if (seen.attached is not None or seen.loaded) and detach:
        return [Move(StepName.DETACH)]
    return []


def _quiet(seen: Observed) -> list[Move]:
    if seen.serving is not None and seen.frontend:
        return [Move(StepName.STOP_SERVING)]
    if seen.awake and not seen.drained:
        # A dead frontend's requests still run in the engine; a new one hands their tokens out and they can end.
        return [Move(StepName.DRAIN) if seen.frontend else Move(StepName.START_FRONTEND)]
    return []


def _to_sleep(wanted: Wanted, seen: Observed) -> tuple[Move, ...]:
    """A sleeper may be told to have its image made anew: its skeleton is written, proved, and sleeps on."""
    d = wanted.directive
    assert d is not None
    if seen.engine is EngineState.STARTING:
        return (Move(StepName.CONNECT),)
    if seen.engine is EngineState.CHECKPOINTED:
        return (Move(StepName.END_ENGINE),)  # it has no cells to come back to
    if moves := _leave(seen):
        return tuple(moves)
    if not seen.verified:
        return (Move(StepName.VERIFY),)
    if d.code == REBUILD and not wanted.answered:
        if not seen.sought:
            return (Move(StepName.SEEK),)
        if seen.kept is None:
            return _to_image(d, seen)
    return (Move(StepName.DROP_CELLS),) if seen.grant is not None else ()


def _to_checkpoint(wanted: Wanted, seen: Observed) -> tuple[Move, ...]:
    """Asleep first, then off the device. From the disk only as far as that, and with the weights that wait for a place, too."""
    d = wanted.directive
    assert d is not None
    if seen.engine is EngineState.STARTING:
        return (Move(StepName.CONNECT),)
    if seen.engine is EngineState.CONNECTED:
        if moves := _leave(seen):
            return tuple(moves)
        return (Move(StepName.CHECKPOINT if seen.verified else StepName.VERIFY),)
    moves = _ready(seen, Goal(d.model, d.revision), mapped=False) if d.model is not None and not wanted.answered else []
    if seen.engine is EngineState.ABSENT:
        if not seen.holder:
            moves.append(Move(StepName.START_HOLDER))
        elif seen.prepared is not None and seen.image is not None:
            moves.append(Move(StepName.RESTORE))
    elif seen.grant is not None:
        moves.append(Move(StepName.DROP_CELLS))
    return tuple(moves)


def _to_saved(wanted: Wanted, seen: Observed) -> tuple[Move, ...]:
    """Asleep first, then on disk, and only when that is proved is the process ended."""
    d = wanted.directive
    assert d is not None
    if not seen.present and (wanted.answered or seen.kept is not None):
        return ()
    if seen.engine is EngineState.STARTING:
        return (Move(StepName.CONNECT),)
    if moves := _leave(seen):
        return tuple(moves)
    if not seen.verified:
        return (Move(StepName.VERIFY),)
    if not seen.sought:
        return (Move(StepName.SEEK),)
    if seen.kept is None:
        return _to_image(d, seen)
    if seen.grant is not None:
        return (Move(StepName.DROP_CELLS),)
    if seen.engine in (EngineState.CONNECTED, EngineState.CHECKPOINTED):
        return (Move(StepName.END_ENGINE),)
    return (Move(StepName.CLEAR),)


def _to_image(d: Directive, seen: Observed) -> tuple[Move, ...]:
    """A new image is proved with the weights that were mapped last, so these and their cells are needed once more."""
    assert d.model is not None
    goal = Goal(d.model, d.revision)
    if moves := _ready(seen, goal, mapped=False):
        return tuple(moves)
    if seen.grant is None:
        return (Move(StepName.TAKE_CELLS, grant=d.grant),)
    if not _staged(seen, goal):
        if seen.engine is EngineState.CHECKPOINTED:
            return (Move(StepName.CUDA_RESTORE, grant=d.grant),)
        return (Move(StepName.DEPOSIT, goal),)
    if seen.loaded:
        return (Move(StepName.DETACH),)
    return (Move(StepName.BUILD, goal) if seen.verified else Move(StepName.VERIFY),)


def _to_cold(seen: Observed) -> tuple[Move, ...]:
    if seen.engine is EngineState.CONNECTED:
        if seen.serving is not None and seen.frontend:
            return (Move(StepName.STOP_SERVING),)
        if seen.awake and not seen.drained:
            return (Move(StepName.DRAIN) if seen.frontend else Move(StepName.END_ENGINE),)
    if seen.engine in (EngineState.STARTING, EngineState.CONNECTED, EngineState.CHECKPOINTED):
        return (Move(StepName.END_ENGINE),)
    return (Move(StepName.CLEAR),) if seen.present else ()
