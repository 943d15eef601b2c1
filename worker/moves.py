"""The words of a plan: steps, what they are for, and what is really there of an instance."""

from enum import StrEnum
from typing import Final

from msgspec import Struct


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
