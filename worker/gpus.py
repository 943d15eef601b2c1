"""GPUs of this node and what processes use of them, by the driver's word (NVML). A node without a driver has none."""

import contextlib
import functools

import pynvml
from msgspec import Struct


class Gpu(Struct, frozen=True):
    uuid: str
    name: str
    size_bytes: int
    index: int
    """In the order of the bus: what CUDA counts with `CUDA_DEVICE_ORDER=PCI_BUS_ID`."""


def gpus() -> tuple[Gpu, ...]:
    """None where there is no driver or no device."""
    with contextlib.suppress(pynvml.NVMLError):
        _session()
        return tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    return ()


def visible(named: str | None) -> tuple[Gpu, ...]:
    """Those of `gpus` that a value of CUDA_VISIBLE_DEVICES names, in its order; None: all."""
    here = gpus()
    if named is None:
        return here
    known = {key: one for one in here for key in (str(one.index), one.uuid)}
    return tuple(dict.fromkeys(known[name] for name in map(str.strip, named.split(",")) if name in known))


def architecture(uuid: str) -> str:
    """Compute capability, such as `9.0`, by which code is compiled. Raises pynvml.NVMLError."""
    _session()
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    return f"{major}.{minor}"


def used_by(uuid: str, pid: int) -> int | None:
    """Bytes that a process (by the pid of the driver's own namespace) uses; None: the driver does not say."""
    return processes(uuid).get(pid)


def processes(uuid: str) -> dict[int, int]:
    """Process id -> bytes, of all that compute on a device. Empty where the driver does not tell."""
    with contextlib.suppress(pynvml.NVMLError):
        _session()
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        return {one.pid: one.usedGpuMemory or 0 for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}
    return {}


def used_bytes(uuid: str) -> int | None:
    """Of a device, by whomever; None: the driver does not say."""
    with contextlib.suppress(pynvml.NVMLError):
        _session()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).used)
    return None


def driver_version() -> str:
    """E.g. `580.159.04`; empty where there is no driver."""
    with contextlib.suppress(pynvml.NVMLError):
        _session()
        return str(pynvml.nvmlSystemGetDriverVersion())
    return ""


def cuda_version() -> str:
    """Of the driver, e.g. `13.0`; empty where there is none."""
    with contextlib.suppress(pynvml.NVMLError):
        _session()
        number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return f"{number // 1000}.{number % 1000 // 10}"
    return ""


def free_bytes(uuid: str) -> int:
    """Of a device, by the driver's word. Raises pynvml.NVMLError."""
    _session()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(uuid)).free)


def leave() -> None:
    """Let go of the driver: what it has open in this process can't be written to disk. The next question opens it again."""
    _session.cache_clear()
    for _ in range(16):  # it counts its users, and libraries of others are among them
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return


def _gpu(index: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(index)
    size = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
    return Gpu(pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetName(device), size, index)


@functools.cache
def _session() -> None:
    """NVML once a process: its start costs more than all that is asked of it. Raises pynvml.NVMLError, then again."""
    pynvml.nvmlInit()
