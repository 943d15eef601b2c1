"""The pool daemon on a real device: bytes arrive, are read-only, are shared, and go when they should, whoever dies."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pool.client import PoolRefused
from pool.devicelink import DeviceAttachment, attach_device, deposit, exchange
from pool.messages import Attached, Deposit, Tensor
from tests.gpu.onlookers import on
from tests.poolroom import Daemon, wait_for, write_safetensors
from worker import gpus

MIB = 1 << 20
SEGMENTS, SIZE = 8, 64 * MIB


class Importer:
    """What an engine does with descriptors: import, map at addresses of its own, read."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        from pool.cuda import access, checked

        self.driver, self.checked = driver, checked
        checked("cuInit", driver.cuInit(0))
        device = checked("cuDeviceGet", driver.cuDeviceGet(0))
        checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(checked("retain", driver.cuDevicePrimaryCtxRetain(device))))
        self.rights = access(0, writable=False)
        self.mapped: list[tuple[int, int, Any]] = []

    def map(self, attached: Attached, fds: list[int]) -> None:
        from pool.cuda import imported, map_at

        for fd, size in zip(fds, attached.segments[: len(attached.segments) - attached.host_segments], strict=False):
            address = int(self.checked("reserve", self.driver.cuMemAddressReserve(size, 2 * MIB, 0, 0)))
            handle = imported(fd)
            map_at(address, size, handle, self.rights)
            self.mapped.append((address, size, handle))

    def read(self, segment: int) -> np.ndarray:
        address, size, _ = self.mapped[segment]
        host = np.empty(size, np.uint8)
        self.checked("cuMemcpyDtoH", self.driver.cuMemcpyDtoH(host.ctypes.data, address, size))
        return host

    def unmap(self) -> None:
        for address, size, handle in self.mapped:
            self.checked("cuMemUnmap", self.driver.cuMemUnmap(address, size))
            self.checked("cuMemRelease", self.driver.cuMemRelease(handle))
        self.mapped.clear()


class House:
    def __init__(self, path: Path) -> None:
        source = path / "source"
        source.mkdir()
        write_safetensors(source / "model.safetensors", {"x": np.arange(64, dtype=np.float32)})
        self.bytes = np.random.default_rng(3).integers(0, 255, (SEGMENTS, SIZE), np.uint8)
        tensors = tuple(
            Tensor(name=f"t{number}", dtype="U8", shape=(SIZE,), segment=number, offset=0, size_bytes=SIZE)
            for number in range(SEGMENTS)
        )
        self.request = Deposit(source=str(source), form="cfg", segments=(SIZE,) * SEGMENTS, host_segments=0, tensors=tensors)
        (path / "pool").mkdir(mode=0o700)
        self.daemon = Daemon(path / "pool", budget=2 << 30, extra=("--gpus",)).start()
        self.importer = Importer()
        self.weight_set = deposit(self.daemon.socket, self.request, self.write).weight_set

    def write(self, fds: list[int]) -> None:
        for fd, data in zip(fds, self.bytes, strict=True):
            os.pwrite(fd, data.data, 0)

    def attach(self, device: gpus.Gpu) -> DeviceAttachment:
        return attach_device(self.daemon.socket, self.weight_set, device.uuid, self.importer.map)

    def used(self, device: gpus.Gpu) -> int:
        """Bytes of a device without the set, after a first copy: the daemon's context has grown by some pages by then."""
        without = gpus.used_bytes(device.uuid)
        attach_device(self.daemon.socket, self.weight_set, device.uuid, lambda attached, fds: None).release()
        wait_for(lambda: gpus.used_bytes(device.uuid) - without < SIZE, 5.0)
        return gpus.used_bytes(device.uuid)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    found = House(tmp_path)
    yield found
    if found.daemon.process is not None and found.daemon.process.poll() is None:
        found.daemon.stop()


def test_bytes_arrive_cannot_be_written_and_their_memory_comes_back(house: House, device: gpus.Gpu) -> None:
    before = house.used(device)
    attachment = house.attach(device)
    assert attachment.filled is not None
    assert attachment.filled.copied_bytes == SEGMENTS * SIZE
    for number in range(SEGMENTS):
        assert np.array_equal(house.importer.read(number), house.bytes[number])
    status, *_ = house.importer.driver.cuMemsetD8(house.importer.mapped[0][0], 1, 16)
    assert int(status) != 0, "read-only memory was written"
    assert gpus.used_bytes(device.uuid) - before >= SEGMENTS * SIZE
    house.importer.unmap()
    released = attachment.release()
    assert released is not None
    assert released.freed_bytes == SEGMENTS * SIZE
    back(device, before)


def test_two_users_share_one_copy(house: House, device: gpus.Gpu) -> None:
    first = house.attach(device)
    before = gpus.used_bytes(device.uuid)
    second = attach_device(house.daemon.socket, house.weight_set, device.uuid, lambda attached, fds: None)
    assert second.filled is not None
    assert second.filled.copied_bytes == 0
    assert gpus.used_bytes(device.uuid) - before < 2 * MIB
    second.release()
    assert np.array_equal(house.importer.read(1), house.bytes[1])
    house.importer.unmap()
    first.release()


def test_what_is_mapped_outlives_the_daemon_and_the_next_one_serves_the_set_again(house: House, device: gpus.Gpu) -> None:
    before = gpus.used_bytes(device.uuid)
    attachment = house.attach(device)
    house.daemon.process.send_signal(signal.SIGKILL)  # type: ignore[union-attr]
    house.daemon.process.wait(20)  # type: ignore[union-attr]
    assert np.array_equal(house.importer.read(2), house.bytes[2])
    house.daemon.start()
    again = attach_device(house.daemon.socket, house.weight_set, device.uuid, lambda attached, fds: None)
    assert again.filled is not None
    assert again.filled.copied_bytes == SEGMENTS * SIZE, "device memory of a dead daemon is shared with nobody"
    again.release()
    house.importer.unmap()
    attachment.close()
    wait_for(lambda: gpus.used_bytes(device.uuid) - before < 1024 * MIB)


def test_a_set_larger_than_what_is_free_is_refused_with_both_numbers(house: House, device: gpus.Gpu) -> None:
    importer = house.importer
    free, _ = importer.checked("cuMemGetInfo", importer.driver.cuMemGetInfo())
    hog = importer.checked("cuMemAlloc", importer.driver.cuMemAlloc(int(free) - 256 * MIB))
    with pytest.raises(PoolRefused) as refused:
        house.attach(device)
    assert refused.value.code == "device_full"
    assert refused.value.need_bytes == SEGMENTS * SIZE > refused.value.free_bytes
    assert f"process {os.getpid()} has" in refused.value.message, "who has the rest"
    importer.checked("cuMemFree", importer.driver.cuMemFree(hog))
    attachment = house.attach(device)
    importer.unmap()
    attachment.release()


def test_a_switch_takes_place_in_memory_that_is_mapped(house: House, device: gpus.Gpu) -> None:
    attachment = house.attach(device)
    before = gpus.used_bytes(device.uuid)
    house.bytes = house.bytes[::-1].copy()
    second = deposit(house.daemon.socket, house.request, house.write).weight_set
    assert second != house.weight_set
    attachment = exchange(attachment, second)
    for number in range(SEGMENTS):
        assert np.array_equal(house.importer.read(number), house.bytes[number])
    assert abs(gpus.used_bytes(device.uuid) - before) < SIZE, "not even one segment more"
    house.importer.unmap()
    released = attachment.release()
    assert released is not None
    assert released.freed_bytes == SEGMENTS * SIZE


# ---- deaths in the middle of a copy, bad bytes ----------------------------------------------------------------


def back(device: gpus.Gpu, before: int) -> float:
    """Seconds until the device's memory is as it was (`House.used`)."""
    begun = time.monotonic()
    try:
        wait_for(lambda: gpus.used_bytes(device.uuid) - before < 2 * MIB, 5.0)
    except AssertionError as error:
        raise AssertionError(f"{error}: {gpus.used_bytes(device.uuid)} bytes, {before} before; {on(device.uuid)}") from error
    return time.monotonic() - begun


def engine_that_dies(socket: Path, weight_set: str, uuid: str) -> None:
    importer = Importer()

    def dies(attached: Attached, fds: list[int]) -> None:
        importer.map(attached, fds)
        os.kill(os.getpid(), signal.SIGKILL)

    attach_device(socket, weight_set, uuid, dies)


def test_an_engine_killed_in_the_middle_of_its_wake_leaves_the_device_as_it_was(house: House, device: gpus.Gpu) -> None:
    before = house.used(device)
    spawn = multiprocessing.get_context("spawn")
    engine = spawn.Process(target=engine_that_dies, args=(house.daemon.socket, house.weight_set, device.uuid))
    engine.start()
    engine.join(60)
    assert engine.exitcode == -signal.SIGKILL
    back(device, before)
    attachment = house.attach(device)
    assert np.array_equal(house.importer.read(3), house.bytes[3])
    house.importer.unmap()
    attachment.release()


def test_a_daemon_killed_in_the_middle_of_a_copy_leaves_nothing_and_the_next_one_pins_what_it_finds(
    house: House, device: gpus.Gpu
) -> None:
    without = gpus.used_bytes(device.uuid)

    def kills(attached: Attached, fds: list[int]) -> None:
        house.daemon.kill()  # at once: half a gigabyte is there within 10 ms
        house.importer.map(attached, fds)

    with pytest.raises(OSError):  # noqa: PT011 - the connection's end, whichever way it shows
        attach_device(house.daemon.socket, house.weight_set, device.uuid, kills)
    house.importer.unmap()
    wait_for(lambda: gpus.used_bytes(device.uuid) < without, 5.0)  # its context has gone as well
    pinned = len(house.daemon.events("registered"))
    house.daemon.start()
    wait_for(lambda: len(house.daemon.events("registered")) > pinned, 20.0)
    attachment = house.attach(device)
    assert np.array_equal(house.importer.read(5), house.bytes[5])
    house.importer.unmap()
    attachment.release()


def test_a_corrupt_segment_is_found_refused_and_brought_anew(house: House, device: gpus.Gpu) -> None:
    segment = house.daemon.root / house.weight_set / "00002.segment"
    segment.chmod(0o600)
    with segment.open("r+b") as file:
        file.seek(4711)
        file.write(bytes([int(house.bytes[2][4711]) ^ 1]))

    async def verify() -> tuple[str, ...]:
        async with house.daemon.client() as client:
            return (await client.verify(house.weight_set)).bad

    assert asyncio.run(verify()) == ("t2",)
    with pytest.raises(PoolRefused, match="corrupt"):
        house.attach(device)
    assert deposit(house.daemon.socket, house.request, house.write).weight_set == house.weight_set
    attachment = house.attach(device)
    assert np.array_equal(house.importer.read(2), house.bytes[2])
    house.importer.unmap()
    attachment.release()


def test_a_neighbour_with_a_link_of_its_own_carries_half(house: House, device: gpus.Gpu) -> None:
    """Again and again: that it copies is not taken for computing."""
    if len(gpus.gpus()) < 2 or os.environ.get("CUDA_VISIBLE_DEVICES"):
        pytest.skip("one GPU here")
    ends = time.monotonic() + 3
    while True:
        attachment = house.attach(device)
        assert attachment.filled is not None
        shards = attachment.filled.shards
        if len(shards) == 1:
            pytest.skip("no neighbour here may help: no NVLink, or one uplink for both")
        assert sum(shard.copied_bytes for shard in shards) == SEGMENTS * SIZE
        if time.monotonic() > ends:
            break
        house.importer.unmap()
        attachment.release()
    for number in range(SEGMENTS):
        assert np.array_equal(house.importer.read(number), house.bytes[number])
    helped = next(shard for shard in shards if shard.via != device.uuid)
    assert 0.4 <= helped.copied_bytes / (SEGMENTS * SIZE) <= 0.6
    house.importer.unmap()
    attachment.release()
