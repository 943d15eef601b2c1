"""What `up` knows of a child of its, and `status` shows."""

import signal
import time
from collections.abc import Callable
from typing import Final, Literal

import msgspec

State = Literal["starting", "ready", "silent", "unwatched", "waiting", "stopped"]
ALIVE: Final = frozenset[State]({"ready", "silent", "unwatched"})
"""It did its work when it was last looked at, or should."""


class ChildState(msgspec.Struct, frozen=True, kw_only=True):
    """What `status` shows of a child. `waiting`: it has ended and is started again after a pause. `silent`: it is there and
    does not answer; `since_ms` is then when it last did. `unwatched`: a fault of ours keeps us from seeing whether it does."""

    name: str
    state: State
    pid: int | None
    since_ms: int
    restarts: int
    last_exit: str = ""


class Shown:
    """The state of a child; `changed` is called whenever it is another."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.restarts = 0
        self._changed = changed
        self._state: State = "starting"
        self._since_ms = time.time_ns() // 1_000_000
        self._last_exit = self._verdict = ""

    def silent(self, for_s: float) -> bool:
        """Show that it has not answered for so long, or (0) that it does. True: that is news."""
        state: State = "silent" if for_s > 0 else "ready"
        if state == self._state or self._state not in ALIVE:
            return False
        self._enter(state, for_s)
        return True

    def unwatched(self) -> None:
        """Show that whether it answers is not seen. One that is silent is shown as that still."""
        if self._state == "ready":
            self._enter("unwatched")

    def _ended(self, how: str) -> str:
        """What is shown of its end: why it was killed, if it was."""
        verdict, self._verdict = self._verdict, ""
        return f"killed: it {verdict}" if verdict else how

    def _enter(self, state: State, ago_s: float = 0) -> None:
        self._state, self._since_ms = state, time.time_ns() // 1_000_000 - round(1000 * ago_s)
        self._changed()


def ending(code: int) -> str:
    """How a process ended, by its exit code (negative: the signal), as `status` says it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most of the real-time signals have no name
        return f"killed by signal {-code}"
