"""What an engine is to the process that runs it. `process.py` owns sockets, order and resending; an engine computes."""

from typing import Final, Protocol

import msgspec

from worker.engines.messages import Sampling, State, Stocked

OWN_LAYOUT: Final = frozenset({"vllm"})
"""Engines whose weights only a skeleton can bring, in its own layout, and that hold memory of a GPU from their start on."""


class EngineFault(Exception):
    """An order that was not carried out; the engine is as it was before, unless `fatal`.

    Attributes:
        code: `not_attached`, `not_awake`, `busy`, `layout`, `pool`, `corrupt`, `no_memory`, `not_available`, `failed`,
            of a gang `not_checkpointable`, `graphs_lost` and `rank_silent` (both fatal), or the pool's own code.
    """

    def __init__(self, code: str, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.code, self.message, self.fatal = code, message, fatal


class Output(msgspec.Struct, frozen=True, gc=False):
    """What one step added to one request. `reason` is given with its last ids: `stop`, `length` or `failed`."""

    request: str
    ids: tuple[int, ...]
    reason: str | None = None
    message: str = ""


class Stepped(msgspec.Struct, frozen=True):
    outputs: tuple[Output, ...]
    wait_s: float | None = None
    """Seconds until the next step can do something; 0: at once; None: not before a new order."""


IDLE = Stepped((), None)


class Engine(Protocol):
    """One skeleton. One thread calls every method; all but `stage` return within about a second (the length of a step)."""

    def attach(self, pool_socket: str, weight_set: str) -> None:
        """Map a weight set. Attaching the one that is mapped changes nothing. Raises `EngineFault`."""

    def detach(self) -> None:
        """Unmap it. Raises `EngineFault` (`busy`) while awake."""

    def wake(self, model: str) -> None:
        """Allocate KV memory. Raises `EngineFault` (`not_attached`, `no_memory`)."""

    def sleep(self) -> None:
        """Free KV memory. Raises `EngineFault` (`busy`) while requests run."""

    def submit(self, request: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        """Queue a request. Raises `EngineFault` (`not_awake`, `too_long`)."""

    def abort(self, request: str) -> bool:
        """Forget a request, and say whether it was there."""

    def check(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Generate greedily, undisturbed. Raises `EngineFault` (`not_awake`, `busy`)."""

    def step(self) -> Stepped:
        """Work for a moment on what is queued."""

    def stage(self, pool_socket: str, source: str, form: str) -> Stocked:
        """Bring a source's weights into the pool in this engine's own layout. Raises `EngineFault`; `not_available` from
        engines whose weights the pool stages from their files."""

    def scrub(self) -> None:
        """Drop what callers said and were told, as far as the engine itself keeps it. Raises `EngineFault` (`busy`)."""

    def revived(self) -> None:
        """The process goes on where its image was made, maybe on another day: renew what the kernel had granted it."""

    def moved(self, device: str) -> None:
        """The process was taken to another device (its UUID) while it slept. Raises `EngineFault` (`busy`)."""

    def running(self) -> int:
        """Requests that are queued or running."""

    def state(self) -> State:
        """Where the engine is, by its own measure."""


def staged_from_files() -> EngineFault:
    """What engines answer to `stage` that map the files' own layout."""
    return EngineFault("not_available", "the pool stages this engine's weights from their files: send it `Stage` there")
