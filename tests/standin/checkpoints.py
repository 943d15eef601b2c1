"""`cuda.bindings.driver`, as far as checkpoints of others go: the twin's states; bytes leave the account and come back, on
another device if that is said.
"""

import ctypes
import enum
import json
import uuid
from pathlib import Path
from typing import Any

from tests.standin.install import place
from tests.standin.part import COMMUNICATOR
from tests.standin.room import Room, taken
from worker.cuda.surgeon import CudaRefused, CudaState
from worker.cuda.twin import Twin


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_SUPPORTED = 801


class CUcheckpointLockArgs:
    timeoutMs = 0


class CUuuid:
    """As the binding's: bytes that somebody else keeps."""

    def __init__(self, address: int) -> None:
        self.text = str(uuid.UUID(bytes=ctypes.string_at(address, 16)))


class CUcheckpointGpuPair:
    oldUuid: CUuuid
    newUuid: CUuuid


class CUcheckpointRestoreArgs:
    gpuPairs: list[CUcheckpointGpuPair]
    gpuPairsCount = 0


OK = (CUresult.CUDA_SUCCESS,)
STATES = (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED, CudaState.FAILED)


def cuInit(flags: int) -> Any:
    return OK


def cuCheckpointProcessLock(pid: int, arguments: CUcheckpointLockArgs) -> Any:
    return _told(lambda: _twin().lock(pid, arguments.timeoutMs))


def cuCheckpointProcessCheckpoint(pid: int, arguments: None) -> Any:
    if (answer := _told(lambda: _twin().checkpoint(pid))) != OK:
        return answer
    had = {str(path): path.read_text() for path in _accounts(pid)}
    _kept(pid).write_text(json.dumps(had))
    for path in had:
        Path(path).write_text(f"{0:<20}")
    return OK


def cuCheckpointProcessRestore(pid: int, arguments: CUcheckpointRestoreArgs | None) -> Any:
    if place() / COMMUNICATOR in _open(pid):
        return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
    had: dict[str, str] = json.loads(_kept(pid).read_text())
    room = Room(place())
    places = {pair.oldUuid.text: pair.newUuid.text for pair in arguments.gpuPairs} if arguments is not None else {}
    if arguments is not None and places.keys() != {_bare(device) for device in room.devices}:
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)
    devices = {_bare(device): device for device in room.devices}
    goes = {path: _device(path, places, devices) for path in had}
    for path, size in had.items():
        if int(size) > room.free(goes[path]):
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
    if (answer := _told(lambda: _twin().restore(pid, places))) == OK:
        for path, size in had.items():
            Path(path).write_text(size)
            Path(path).rename(place() / goes[path] / Path(path).name)
    return answer


def _device(path: str, places: dict[str, str], devices: dict[str, str]) -> str:
    """Where what lay in a file of account goes."""
    was = Path(path).parent.name
    return devices[places[_bare(was)]] if places else was


def _bare(device: str) -> str:
    return device.removeprefix("GPU-")


def cuCheckpointProcessUnlock(pid: int, arguments: None) -> Any:
    return _told(lambda: _twin().unlock(pid))


def cuCheckpointProcessGetState(pid: int) -> Any:
    state = _twin().state(pid)
    return (CUresult.CUDA_ERROR_INVALID_VALUE, None) if state is CudaState.NONE else (*OK, STATES.index(state))


def _twin() -> Twin:
    return Twin(place() / "twin")


def _kept(pid: int) -> Path:
    return place() / f"kept-{pid}"


def _accounts(pid: int) -> list[Path]:
    """The process's files of account, by what it has open."""
    devices = {str(place() / uuid) for uuid in Room(place()).devices}
    return [path for path in _open(pid) if str(path.parent) in devices]


def _open(pid: int) -> set[Path]:
    """What the process has open to write."""
    return {Path(taken(str(entry))) for entry in Path(f"/proc/{pid}/fd").iterdir()}


def _told(do: Any) -> Any:
    try:
        do()
    except CudaRefused as refused:
        wrong = CUresult.CUDA_ERROR_INVALID_VALUE if refused.code == "cuda_invalid" else CUresult.CUDA_ERROR_ILLEGAL_STATE
        return (wrong,)
    return OK
