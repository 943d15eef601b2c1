"""What NVML tells of a device: who uses it, whether it computes, how it is joined to another."""

import contextlib
import functools
import os
import time

import pynvml

from pool.gpu import Activity

_LINKS = 18
"""NVLinks a device has at most (Hopper)."""
_LAST_S = 1.0
"""What `activity` looks back on: as old as the driver's word of the whole device may be."""


def users(uuid: str) -> dict[int, int]:
    """Process id -> bytes. Empty where the driver does not tell; ids are those of the driver's own namespace."""
    with contextlib.suppress(pynvml.NVMLError):
        return {one.pid: int(one.usedGpuMemory or 0) for one in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(uuid))}
    return {}


def activity(uuid: str) -> Activity | None:
    """None: the driver does not tell."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = _handle(uuid)
        free = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
        in_use = bool(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return Activity(free, _computing(handle) if in_use else frozenset())
    return None


def _computing(handle: object) -> frozenset[int] | None:
    """On a device that is in use: by the driver's count copies from the host are use, too. As `Activity.computing`."""
    since_us = int((time.time() - _LAST_S) * 1e6)
    try:
        if all(one.pid != os.getpid() for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)):
            return None  # it knows processes by other ids than this machine: a container
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except pynvml.NVMLError_NotFound:  # nobody has computed: of copies it does not always know whose they were
        return frozenset()
    except pynvml.NVMLError:
        return None
    return frozenset(sample.pid for sample in samples if sample.smUtil and sample.pid != os.getpid())


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
