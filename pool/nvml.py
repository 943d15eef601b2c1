"""What NVML tells of a device: who uses it, whether it computes, how it is joined to another."""

import contextlib
import functools

import pynvml

_LINKS = 18
"""NVLinks a device has at most (Hopper)."""


def users(uuid: str) -> dict[int, int]:
    """Process id -> bytes. Empty where the driver does not tell; ids are those of the driver's own namespace."""
    with contextlib.suppress(pynvml.NVMLError):
        return {one.pid: int(one.usedGpuMemory or 0) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(uuid))}
    return {}


def load(uuid: str) -> tuple[int, bool] | None:
    """Free bytes, and whether kernels ran in the driver's last sample (up to a second old). None: it does not tell."""
    with contextlib.suppress(pynvml.NVMLError):
        free = int(pynvml.nvmlDeviceGetMemoryInfo(_handle(uuid)).free)
        return free, bool(pynvml.nvmlDeviceGetUtilizationRates(_handle(uuid)).gpu)
    return None


def joined(uuid: str, other: str) -> bool:
    """Over NVLink. A driver that does not tell about pairs is asked for any link that is up."""
    with contextlib.suppress(pynvml.NVMLError):
        status = pynvml.nvmlDeviceGetP2PStatus(_handle(uuid), _handle(other), pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == pynvml.NVML_P2P_STATUS_OK)
    for link in range(_LINKS):
        with contextlib.suppress(pynvml.NVMLError):
            if pynvml.nvmlDeviceGetNvLinkState(_handle(uuid), link):
                return True
    return False


def link(uuid: str) -> tuple[int, int] | None:
    """Generation and lanes of its way to the host, as device and machine both have them: an idle one's link is turned down."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = _handle(uuid)
        return int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)), int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    return None


@functools.cache
def _session() -> None:
    """Raises pynvml.NVMLError, then again."""
    pynvml.nvmlInit()


@functools.cache
def _handle(uuid: str) -> object:
    _session()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)
