"""NVML's part of a pretended machine: what the product asks of `pynvml`, by the same names."""

from types import SimpleNamespace
from typing import Any

from tests.standin.install import place
from tests.standin.room import Room


class NVMLError(Exception):
    pass


def nvmlInit() -> None: ...


def nvmlShutdown() -> None: ...


def nvmlSystemGetDriverVersion() -> str:
    return "580.0.stand-in"


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 13000


def nvmlDeviceGetCudaComputeCapability(handle: str) -> tuple[int, int]:
    return 9, 0


def nvmlDeviceGetCount() -> int:
    return len(_room().devices)


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    return list(_room().devices)[index]


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    if uuid not in _room().devices:
        raise NVMLError(uuid)
    return uuid


def nvmlDeviceGetUUID(handle: str) -> str:
    return handle


def nvmlDeviceGetName(handle: str) -> str:
    return "stand-in"


def nvmlDeviceGetMemoryInfo(handle: str) -> SimpleNamespace:
    room = _room()
    total, used = room.devices[handle], room.used(handle)
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetComputeRunningProcesses(handle: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in _room().processes(handle).items()]


def __getattr__(name: str) -> Any:
    """What this machine's driver does not know."""
    if name.startswith("NVML_"):
        return 0

    def unknown(*_: object) -> None:
        raise NVMLError(f"{name} is not supported")

    if not name.startswith("nvml"):
        raise AttributeError(name)
    return unknown


def _room() -> Room:
    return Room(place())
