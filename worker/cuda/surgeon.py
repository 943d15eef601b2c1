"""What can be done to the CUDA state of another process, whoever does it: the driver, or its twin where there is no GPU."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol


class CudaState(StrEnum):
    """Of one process, as the driver tells it."""

    RUNNING = "running"
    LOCKED = "locked"
    """Its CUDA calls wait. Next: unlock or checkpoint."""
    CHECKPOINTED = "checkpointed"
    """Nothing of it is on a GPU. Next: restore, or kill."""
    FAILED = "failed"
    """A restore has failed: there is no way back. Kill it."""
    NONE = "none"
    """It has no CUDA state."""


class CudaRefused(Exception):
    """The driver's no. `code`: `cuda_lock_timeout`, `cuda_out_of_memory`, `cuda_not_supported`, `cuda_illegal_state`,
    `cuda_invalid` (no such process, or one without CUDA), `cuda_failed`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Surgeon(Protocol):
    """Every call blocks, and may block for ever: see `worker.cuda.step`. Raises CudaRefused."""

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Let what runs end, keep back what comes. After `timeout_ms` without success it is running as before."""

    def checkpoint(self, pid: int) -> None:
        """A locked one's memory to the host, its GPUs released."""

    def restore(self, pid: int, devices: Mapping[str, str]) -> None:
        """Back to the GPU; locked then. A failure is final for the process.

        devices: UUID of each visible GPU -> UUID of the one that takes its place, a bijection; empty: where it was.
        """

    def unlock(self, pid: int) -> None:
        """Let a locked one go on."""

    def state(self, pid: int) -> CudaState:
        """Where it is."""


def exchanged(old: str | None, new: str | None, others: Iterable[str]) -> dict[str, str]:
    """Which GPU takes whose place at a restore: a bijection over all that the machine has, whichever the process sees."""
    if not old or not new or old == new:
        return {}
    return {one: one for one in others} | {old: new, new: old}
