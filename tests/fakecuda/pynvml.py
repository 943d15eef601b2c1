"""NVML over the same devices as the `cuda` package beside it: their names, who reaches whom, nothing that is measured."""

import os

NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0
_COUNT = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
_GENERATION = int(os.environ.get("FAKE_CUDA_GENERATION", "5"))
_BYTES = int(os.environ.get("FAKE_CUDA_BYTES", str(256 << 20)))


class NVMLError(Exception):
    pass


class Memory:
    total = free = _BYTES
    used = 0


class Utilization:
    gpu = 0


def nvmlInit() -> None:
    pass


def nvmlDeviceGetCount() -> int:
    return _COUNT


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    raw = f"{index:02x}" * 16
    return f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"


def nvmlDeviceGetUUID(handle: str) -> str:
    return handle


def nvmlDeviceGetName(handle: str) -> str:
    return "a played one"


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    return uuid


def nvmlDeviceGetComputeRunningProcesses(handle: str) -> list[object]:
    return []


def nvmlDeviceGetMemoryInfo(handle: str) -> Memory:
    return Memory()


def nvmlDeviceGetUtilizationRates(handle: str) -> Utilization:
    return Utilization()


def nvmlDeviceGetP2PStatus(handle: str, other: str, index: int) -> int:
    return NVML_P2P_STATUS_OK


def nvmlDeviceGetMaxPcieLinkGeneration(handle: str) -> int:
    return _GENERATION


def nvmlDeviceGetMaxPcieLinkWidth(handle: str) -> int:
    return 16
