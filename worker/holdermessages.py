"""The holder's wire, `holder.sock`: the worker asks, the holder answers; one question a connection.

Frames as on the pool's wire; the descriptors of `TakeCells` follow its frame, one per cell.
"""

import msgspec

from worker.engines.messages import ControlCommand, ControlReply
from worker.instancedir import Exit
from worker.locks import Share
from worker.processes import Process


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start the engine. Answer: `Held`. Denied: `start_failed`, `started_already` (there was one, dead or alive, that did not
    end in an image; one that was restored or parked once is followed by a cold one)."""

    argv: tuple[str, ...]


class TakeCells(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Hold these cells' locks. Denied: `fenced` (an older grant than one seen before), `holds_cells` (drop those first)."""

    grant: int
    """A gang's: of its first rank."""
    shares: tuple[Share, ...]
    """A gang has one of each of its devices."""

    @property
    def count(self) -> int:
        return sum(len(share.numbers) for share in self.shares)


class DropCells(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give the locks up: the memory was measured as free."""


class Tell(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pass a command on to the engine. Answer: `Told`, or `Denied` (`engine_died`, `not_connected`, `step_deadline`)."""

    command: ControlCommand
    deadline_ms: int


class ParkEngine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have the engine forget its callers, close everything and wait for its release. Answer: `Held`, parked.

    What holds a GPU is taken off it between this and `Dump`, and put back on it between `Restore` and `Release`; both are the
    worker's. Denied: the engine's code, `engine_died`, `not_connected`, `no_space`, `step_deadline` (it is released again).
    """

    deadline_ms: int


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tell the parked engine that it is this instance's; it connects. Denied: `not_parked`."""


class Dump(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Park the engine, unless it is, write it to `directory` with `criu`, and end it. Answer: `Held`, without an engine.

    Denied: `engine_died`, `not_connected`, `dump_failed`, `no_space` (the engine is as it was before), `step_deadline`.
    """

    criu: str
    directory: str
    deadline_ms: int


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring the engine of `directory` back; `pid` is its pid in the image, `place` where it looks for its release, which it
    gets at once unless `parked`: then it waits for `Release`.

    Answer: `Held`, with the engine. Denied: `started_already`, `pid_taken`, `no_release`, `restore_failed`, `step_deadline`;
    whatever had come to life by then has been ended; `unkillable`: it has not.
    """

    criu: str
    directory: str
    pid: int
    place: str
    deadline_ms: int
    parked: bool = False


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the engine: SIGTERM, SIGKILL after `grace_ms` (0: at once), reap it and whatever it left behind."""

    grace_ms: int


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Kill the engine if it lives, give everything up, exit."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How do things stand? Answer: `Held`."""


class Held(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How things stand."""

    pid: int
    engine: Process | None
    """The engine, dead or alive; None: never started, or written to disk."""
    exit: Exit | None
    connected: bool
    """Whether the engine has connected to `control.sock`."""
    grant: int | None
    """The grant whose cells are held."""
    shares: tuple[Share, ...] = ()
    """Of which devices they are."""
    place: str = ""
    """The instance's directory, as the engine sees it."""
    inner_pid: int = 0
    """The engine's pid in the holder's own pid namespace; 0: there is none."""
    park_in: str = ""
    """The directory in which an engine of this holder waits for its release."""
    parked: bool = False
    """Whether it waits there now."""


class Told(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reply: ControlReply


class Denied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    code: str
    message: str


HolderRequest = Start | TakeCells | DropCells | Tell | ParkEngine | Dump | Restore | Release | Kill | Leave | Ask
HolderReply = Held | Told | Denied
