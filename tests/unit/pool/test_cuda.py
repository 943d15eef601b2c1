"""What the pool makes of a driver that says no: who hears of it, and that nothing stays. The driver is played."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pool.gpu import NoDeviceMemory

FAKE = Path(__file__).parents[2] / "fakecuda"
MIB = 1 << 20
FULL, LOST = 2, 719


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`pool.cuda` over the played driver, for this test alone."""
    monkeypatch.syspath_prepend(str(FAKE))
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "pool.cuda", "pool.lent"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("pool.cuda")


@pytest.fixture
def calls(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Records the driver's calls; the `nth` of one name fails with this number."""

    def record(failing: str = "", nth: int = 1, code: int = FULL) -> list[str]:
        made: list[str] = []

        def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                made.append(name)
                return (code, None) if name == failing and made.count(name) == nth else call(*args)

            return run

        for name in [name for name in vars(cuda.driver) if name.startswith("cu")]:
            monkeypatch.setattr(cuda.driver, name, wrapped(name, getattr(cuda.driver, name)))
        return made

    return record


@pytest.mark.parametrize(("failing", "nth"), [("cuMemAlloc", 1), ("cuStreamCreate", 2), ("cuEventCreate", 5)])
def test_a_ring_that_finds_no_room_leaves_nothing_and_says_which_it_is(
    cuda: Any, calls: Callable[..., list[str]], failing: str, nth: int
) -> None:
    gpu = cuda.CudaGpu(0)
    made = calls(failing, nth)
    with pytest.raises(NoDeviceMemory, match=failing):
        gpu.relay(4, 2 * MIB)
    for make, undo in (("cuMemAlloc", "cuMemFree"), ("cuStreamCreate", "cuStreamDestroy"), ("cuEventCreate", "cuEventDestroy")):
        assert made.count(make) - (make == failing) == made.count(undo)


@pytest.mark.parametrize("failing", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_mapped_goes_again(cuda: Any, calls: Callable[..., list[str]], failing: str) -> None:
    gpu = cuda.CudaGpu(0)
    free = gpu.free_bytes()
    made = calls(failing, code=LOST)
    with pytest.raises(OSError, match=failing):
        gpu.create(2 * MIB)
    assert gpu.free_bytes() == free
    assert made.count("cuMemAddressReserve") - (failing == "cuMemAddressReserve") == made.count("cuMemAddressFree")


@pytest.mark.parametrize(("failing", "left"), [("cuMemUnmap", 2 * MIB), ("cuMemRelease", 0)])
def test_what_of_an_engines_mappings_did_not_go_goes_at_the_next_try_and_nothing_is_done_twice(
    cuda: Any, calls: Callable[..., list[str]], failing: str, left: int
) -> None:
    gpu, mapped = cuda.CudaGpu(0), importlib.import_module("pool.lent").Mapped()
    for _ in range(2):
        fd = gpu.export(gpu.create(2 * MIB))
        address = cuda.checked("cuMemAddressReserve", cuda.driver.cuMemAddressReserve(2 * MIB, 0, 0, 0))
        handle = cuda.imported(fd)
        os.close(fd)
        cuda.map_at(address, 2 * MIB, handle, cuda.access(0, writable=False))
        mapped.add(address, 2 * MIB, handle)
    assert mapped.size_bytes == 4 * MIB
    made = calls(failing, code=LOST)
    with pytest.raises(OSError, match=failing):
        mapped.clear()
    assert mapped.size_bytes == left
    mapped.clear()
    mapped.clear()
    assert mapped.size_bytes == 0
    for call in ("cuMemUnmap", "cuMemRelease"):
        assert made.count(call) == 2 + (call == failing)


@pytest.mark.parametrize("failing", ["cuMemUnmap", "cuMemAddressFree"])
def test_what_can_be_given_back_is_given_back_whatever_went_wrong_before(
    cuda: Any, calls: Callable[..., list[str]], failing: str
) -> None:
    gpu = cuda.CudaGpu(0)
    free, block = gpu.free_bytes(), gpu.create(2 * MIB)
    calls(failing, code=LOST)
    with pytest.raises(OSError, match=failing):
        gpu.destroy(block)
    assert gpu.free_bytes() == free


def test_a_ring_goes_whole_whatever_went_wrong_before(cuda: Any, calls: Callable[..., list[str]]) -> None:
    gpu = cuda.CudaGpu(0)
    ring = gpu.relay(4, 2 * MIB)
    made = calls("cuEventDestroy", 3, LOST)
    with pytest.raises(OSError, match="cuEventDestroy"):
        ring.close()
    assert [made.count(name) for name in ("cuEventDestroy", "cuStreamDestroy", "cuMemFree")] == [8, 2, 1]


def test_stacks_are_as_told_and_what_they_were_is_known(cuda: Any, calls: Callable[..., list[str]]) -> None:
    assert cuda.stacks(16) == 1024
    assert cuda.stacks(1024) == 16
    calls("cuCtxSetLimit")
    with pytest.raises(cuda.CudaError, match="cuCtxSetLimit"):
        cuda.stacks(16)
    assert cuda.stacks(1024) == 1024
