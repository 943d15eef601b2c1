"""Who else computes on a device, by what NVML tells of it."""

import os
from types import SimpleNamespace

import pynvml
import pytest

from pool import nvml
from pool.gpu import Activity

FREE = 7 << 30
SELF, OTHER = os.getpid(), os.getpid() + 1


def sample(pid: int, kernels: int) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, smUtil=kernels, memUtil=1, timeStamp=1)


def told(
    monkeypatch: pytest.MonkeyPatch,
    *,
    used: int,
    processes: list[SimpleNamespace] | pynvml.NVMLError,
    there: tuple[int, ...] = (SELF, OTHER),
) -> Activity | None:
    def by_process(handle: object, since_us: int) -> list[SimpleNamespace]:
        if isinstance(processes, Exception):
            raise processes
        return processes

    def on_it(handle: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=1) for pid in there]

    monkeypatch.setattr(nvml, "_handle", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(free=FREE))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=used))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", on_it)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetProcessUtilization", by_process)
    return nvml.activity("GPU-0")


@pytest.mark.parametrize(
    ("processes", "computing"),
    [
        pytest.param([sample(SELF, 99)], set(), id="own copies, which the driver counts as kernels"),
        pytest.param([sample(SELF, 99), sample(OTHER, 0)], set(), id="another one that rests"),
        pytest.param([sample(SELF, 3), sample(OTHER, 97)], {OTHER}, id="another one that decodes beside copies"),
        pytest.param(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND), set(), id="copies whose process is not told"),
    ],
)
def test_what_this_process_copies_is_nobodys_computing(
    monkeypatch: pytest.MonkeyPatch, processes: list[SimpleNamespace] | pynvml.NVMLError, computing: set[int]
) -> None:
    assert told(monkeypatch, used=100, processes=processes) == Activity(FREE, computing)


@pytest.mark.parametrize("why", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_where_processes_are_not_told_apart_anybody_may_compute(monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    found = told(monkeypatch, used=1, processes=pynvml.NVMLError(why))
    assert found == Activity(FREE, None) and found is not None and found.anybody


def test_a_driver_that_knows_this_process_by_another_id_tells_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, used=100, processes=[sample(OTHER, 99)], there=(OTHER,)) == Activity(FREE, None)


def test_an_unused_device_computes_nothing_and_nobody_asks_further(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, used=0, processes=[sample(OTHER, 50)])
    assert found == Activity(FREE) and found is not None and not found.anybody


def test_a_driver_that_does_not_tell_is_no_activity_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def untold(handle: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(nvml, "_handle", lambda uuid: uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", untold)
    assert nvml.activity("GPU-0") is None
