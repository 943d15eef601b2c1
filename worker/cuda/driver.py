"""`Surgeon` over the CUDA driver's checkpoint API (driver 570 or newer)."""

import ctypes
import uuid
from collections.abc import Mapping
from typing import Any, Final

from cuda.bindings import driver

from worker.cuda.surgeon import CudaRefused, CudaState

_CODES: Final = {
    "CUDA_ERROR_NOT_READY": "cuda_lock_timeout",
    "CUDA_ERROR_OUT_OF_MEMORY": "cuda_out_of_memory",
    "CUDA_ERROR_NOT_SUPPORTED": "cuda_not_supported",
    "CUDA_ERROR_ILLEGAL_STATE": "cuda_illegal_state",
    "CUDA_ERROR_INVALID_VALUE": "cuda_invalid",
}
_STATES: Final = (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED, CudaState.FAILED)


class CudaSurgeon:
    """A restore needs the driver initialised in the asking process (or persistence mode on), so that comes first."""

    def __init__(self) -> None:
        """Raises CudaRefused: no driver, or none that works."""
        try:
            _checked("cuInit", driver.cuInit(0))
        except RuntimeError as error:
            raise CudaRefused("cuda_not_supported", str(error)) from error

    def lock(self, pid: int, timeout_ms: int) -> None:
        arguments = driver.CUcheckpointLockArgs()
        arguments.timeoutMs = timeout_ms
        _checked("lock", driver.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> None:
        _checked("checkpoint", driver.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int, devices: Mapping[str, str]) -> None:
        if not devices:
            _checked("restore", driver.cuCheckpointProcessRestore(pid, None))
            return
        kept: list[Any] = []  # the driver reads the bytes where they are
        arguments = driver.CUcheckpointRestoreArgs()
        arguments.gpuPairs = [_pair(old, new, kept) for old, new in devices.items()]
        arguments.gpuPairsCount = len(devices)
        _checked("restore", driver.cuCheckpointProcessRestore(pid, arguments))

    def unlock(self, pid: int) -> None:
        _checked("unlock", driver.cuCheckpointProcessUnlock(pid, None))

    def state(self, pid: int) -> CudaState:
        answer = driver.cuCheckpointProcessGetState(pid)
        if getattr(answer[0], "name", "") == "CUDA_ERROR_INVALID_VALUE":
            return CudaState.NONE
        return _STATES[int(_checked("state", answer))]


def _pair(old: str, new: str, kept: list[Any]) -> Any:
    pair = driver.CUcheckpointGpuPair()
    pair.oldUuid, pair.newUuid = _uuid(old, kept), _uuid(new, kept)
    return pair


def _uuid(text: str, kept: list[Any]) -> Any:
    """As NVML writes it, with or without its `GPU-`."""
    buffer = ctypes.create_string_buffer(uuid.UUID(text.removeprefix("GPU-")).bytes, 16)
    kept.append(buffer)
    return driver.CUuuid(ctypes.addressof(buffer))


def _checked(call: str, answer: Any) -> Any:
    if int(answer[0]):
        name = str(getattr(answer[0], "name", answer[0]))
        raise CudaRefused(_CODES.get(name, "cuda_failed"), f"{call}: {name} ({int(answer[0])})")
    return answer[1] if len(answer) > 1 else None
