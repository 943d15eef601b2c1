"""What `up` knows of a child of its, and `status` shows."""

import signal
from typing import Literal

import msgspec

State = Literal["starting", "ready", "silent", "waiting", "stopped"]


class ChildState(msgspec.Struct, frozen=True, kw_only=True):
    """What `status` shows of a child. `waiting`: it has ended and is started again after a pause. `silent`: it is there and
    does not answer; `since_ms` is then when it last did."""

    name: str
    state: State
    pid: int | None
    since_ms: int
    restarts: int
    last_exit: str = ""


def silence(state: State, for_s: float) -> State | None:
    """What a child that has not answered for so long (0: it does) is in, if that is another state than before."""
    match state:
        case "ready" if for_s > 0:
            return "silent"
        case "silent" if for_s == 0:
            return "ready"
    return None


def ending(code: int) -> str:
    """How a process ended, by its exit code (negative: the signal), as `status` says it."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
