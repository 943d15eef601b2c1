"""What NVML tells of a device: who uses it, whether it computes, how it is joined to another."""

import contextlib
import functools
import os
import time

import pynvml

_LINKS = 18
"""NVLinks a device has at most (Hopper)."""
_LAST_S = 1.0
"""What `load` looks back on: as old as the driver's word of the whole device may be."""


def users(uuid: str) -> dict[int, int]:
    """Process id -> bytes. Empty where the driver does not tell; ids are those of the driver's own namespace."""
    with contextlib.suppress(pynvml.NVMLError):
        return {one.pid: int(one.usedGpuMemory or 0) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(uuid))}
    return {}


def load(uuid: str) -> tuple[int, bool] | None:
    """Free bytes, and whether anybody else computed there in the last second. None: the driver does not tell."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = _handle(uuid)
        free = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        return free, bool(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) and _others_compute(handle)
    return None


def _others_compute(handle: object) -> bool:
    """Of a device that was in use: copies from the host are use, too, by this driver's count. True where it does not tell
    processes apart, or knows this one by another id (some containers)."""
    since_us = int((time.time() - _LAST_S) * 1e6)
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except pynvml.NVMLError:
        return True
    return any(sample.smUtil and sample.pid != os.getpid() for sample in samples)


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
