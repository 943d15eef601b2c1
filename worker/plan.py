"""What to do next for one instance: a pure function of what should be and what is.

Level-triggered: it is asked again after every step, and does not care how things came to be as they are. Moves that
it names together may run at the same time. An empty answer means: there.
"""

from enum import StrEnum
from typing import Final

from msgspec import Struct

from controlplane.fleet import REBUILD, Directive
from controlplane.rungs import Rung
from worker.desired import Wanted


class StepName(StrEnum):
    PREPARE = "prepare"
    """Have the model's source on this node, converted."""
    STAGE = "stage"
    """Have its weights in the pool."""
    DEPOSIT = "deposit"
    """Have the skeleton bring them there, in the layout that it alone can make."""
    START_HOLDER = "start_holder"
    START_ENGINE = "start_engine"
    RESTORE = "restore"
    """Bring the engine back from its image; one that had a GPU is still off it. If that fails, a cold start follows within the
    same climb."""
    CHECKPOINT = "checkpoint"
    """Park the engine and take it off its GPU."""
    CUDA_RESTORE = "cuda_restore"
    """Put it back on one, and release it. If that fails, its image or a cold start follows within the same climb."""
    FILL = "fill"
    """Have the pool fill the device while the engine is on its way there."""
    SEEK = "seek"
    """Look whether the skeleton is on disk already."""
    BUILD = "build"
    """Write it there, bring it back once, compare a known answer, publish."""
    CONNECT = "connect"
    START_FRONTEND = "start_frontend"
    TAKE_CELLS = "take_cells"
    ATTACH = "attach"
    WAKE = "wake"
    CHECK = "check"
    SERVE = "serve"
    STOP_SERVING = "stop_serving"
    DRAIN = "drain"
    SLEEP = "sleep"
    DETACH = "detach"
    VERIFY = "verify"
    DROP_CELLS = "drop_cells"
    END_ENGINE = "end_engine"
    CLEAR = "clear"


ABANDONABLE: Final = frozenset({StepName.PREPARE, StepName.STAGE, StepName.CONNECT})
"""Long steps that can be given up half-way: what they leave behind is complete or nobody's. Others are finished first."""

SILENT: Final = frozenset({StepName.PREPARE, StepName.STAGE})
"""Steps that may take many minutes and ask nothing of the instance's processes, which may be serving meanwhile."""


class EngineState(StrEnum):
    ABSENT = "absent"
    STARTING = "starting"
    CONNECTED = "connected"
    CHECKPOINTED = "checkpointed"
    """Parked, and nothing of it is on a GPU. It is put back on one, written to disk, or killed; it is asked nothing."""
    DEAD = "dead"


class Goal(Struct, frozen=True):
    """A model at a revision."""

    model: str
    revision: int


class Served(Struct, frozen=True):
    """What the frontend admits requests for."""

    model: str
    revision: int
    grant: int


class Move(Struct, frozen=True):
    """One step, and what it is for: two moves are the same work only if both agree."""

    step: StepName
    goal: Goal | None = None
    grant: int | None = None


class Observed(Struct, frozen=True, kw_only=True):
    """What is really there of one instance."""

    present: bool = False
    """Whether there is a directory."""
    holder: bool = False
    engine: EngineState = EngineState.ABSENT
    frontend: bool = False
    attached: str | None = None
    """The weight set that the engine says is mapped."""
    awake: bool = False
    woken_for: Goal | None = None
    """For which model it was last woken."""
    drained: bool = False
    verified: bool = True
    """Whether the memory was measured as free since the last detach."""
    checked: bool = False
    serving: Served | None = None
    grant: int | None = None
    """The grant whose cells the holder has."""
    image: str | None = None
    """An image that the engine may be restored from."""
    sought: bool = False
    kept: str | None = None
    """The image that holds this skeleton, once it has been looked for or built."""
    own_layout: bool = False
    """Whether the pool has its weights from the skeleton itself, on a device: then cells come before the engine. Known once
    the source is prepared, or the engine was started."""
    device: str | None = None
    """Where its cells are or were last, of a skeleton that holds a GPU or pretends to: to go elsewhere it is taken off it."""
    loaded: bool = False
    """Whether the engine has weights in memory of its own, beside what is attached."""
    filled: str | None = None
    """The weight set that the pool has on the device for an engine that has not mapped it yet."""
    prepared: Goal | None = None
    staged: tuple[Goal, str] | None = None
    """The weight set that was last staged, and for which model."""


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
    return [*moves, *_fill(seen, goal, grant)]


def _fill(seen: Observed, goal: Goal, grant: int) -> list[Move]:
    """The bytes travel while the process comes back. Not before the cells are this grant's."""
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
