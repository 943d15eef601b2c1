"""Segments as lanes see them: pinned once, for all."""

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pool.slabs import PIN_BYTES, Slab
from tests.fakegpu import FakeGpu


@dataclass
class OneProcess(FakeGpu):
    """Ranges are the process's, as with the driver: it refuses one that is being pinned, whoever asks."""

    begun: set[int] = field(default_factory=set)
    beside: threading.Event = field(default_factory=threading.Event)

    def register(self, address: int, size: int) -> None:
        if address in self.begun:
            self.beside.set()
            raise OSError(712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self.begun.add(address)
        self.beside.wait(0.05)  # long enough for the other one to come
        self.registered[address] = size


def test_a_set_that_two_devices_want_at_once_is_pinned_as_a_whole() -> None:
    first, beside = OneProcess(uuid="GPU-0"), threading.Event()
    second = OneProcess(uuid="GPU-1", registered=first.registered, begun=first.begun, beside=beside)
    first.beside = beside
    slab = Slab(address=1 << 40, size=4 * PIN_BYTES)
    lanes = [threading.Thread(target=slab.register, args=(gpu,)) for gpu in (first, second)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join(20)
    assert slab.registered
    assert not slab.refused
    assert sorted(first.registered) == [slab.address + at for at in range(0, slab.size, PIN_BYTES)]


def test_what_the_driver_does_not_pin_is_said_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(pinnable=False)
    slab = Slab(address=1 << 40, size=PIN_BYTES)
    slab.register(gpu)
    slab.register(gpu)
    assert slab.refused
    assert not slab.to_pin
    assert [record.message for record in caplog.records] == ["not_pinned"]


def test_what_leaves_is_unpinned_and_unmapped_piece_by_piece() -> None:
    size = 2 * PIN_BYTES + 4096
    fd = os.memfd_create("segment-that-leaves")
    os.ftruncate(fd, size)
    gpu, slab = FakeGpu(), Slab.over(fd, size)
    os.close(fd)
    slab.pin(gpu)
    slab.pin(gpu)
    first = slab.address
    told = []
    while True:
        told.append((slab.size, sorted(gpu.registered)))
        if slab.give_up(gpu):
            break
        assert not slab.to_pin
    assert told == [(size, [first, first + PIN_BYTES]), (2 * PIN_BYTES, [first, first + PIN_BYTES]), (PIN_BYTES, [first])]
    assert gpu.registered == {}
    assert "memfd:segment-that-leaves" not in Path("/proc/self/maps").read_text()
