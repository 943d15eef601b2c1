"""Whether somebody else computes on a device, by what NVML tells of it."""

import os
from types import SimpleNamespace

import pynvml
import pytest

from pool import nvml

FREE = 7 << 30
SELF, OTHER = os.getpid(), os.getpid() + 1


def sample(pid: int, kernels: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, smUtil=kernels, memUtil=1, timeStamp=1)


def told(
    monkeypatch: pytest.MonkeyPatch, *, used: int, processes: list[SimpleNamespace] | pynvml.NVMLError
) -> tuple[int, bool] | None:
    def by_process(handle: object, since_us: int) -> list[SimpleNamespace]:
        if isinstance(processes, Exception):
            raise processes
        return processes

    monkeypatch.setattr(nvml, "_handle", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(free=FREE))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=used))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", by_process)
    return nvml.load("GPU-0")


@pytest.mark.parametrize(
    ("processes", "computes"),
    [
        pytest.param([sample(SELF, 99)], False, id="own copies, which the driver counts as kernels"),
        pytest.param([sample(SELF, 99), sample(OTHER, 0)], False, id="another one that rests"),
        pytest.param([sample(SELF, 3), sample(OTHER, 97)], True, id="another one that decodes beside copies"),
    ],
)
def test_what_this_process_copies_is_nobodys_computing(
    monkeypatch: pytest.MonkeyPatch, processes: list[SimpleNamespace], computes: bool
) -> None:
    assert told(monkeypatch, used=100, processes=processes) == (FREE, computes)


@pytest.mark.parametrize("why", [pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_where_processes_are_not_told_apart_a_device_in_use_computes(monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    assert told(monkeypatch, used=1, processes=pynvml.NVMLError(why)) == (FREE, True)


def test_an_unused_device_computes_nothing_and_nobody_asks_further(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, used=0, processes=[sample(OTHER, 50)]) == (FREE, False)


def test_a_driver_that_does_not_tell_is_no_load_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def untold(handle: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(nvml, "_handle", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", untold)
    assert nvml.load("GPU-0") is None
