"""Engines with all kinds of addresses come, switch, leave and die side by side: each sees its own set, and nothing stays."""

import asyncio
import os
import random
from pathlib import Path

import pytest

from pool.blocks import Groups
from pool.client import PoolRefused
from pool.devicelink import DeviceAttachment, Spoiled, attach_device, deposit, exchange
from pool.messages import Attached, Tensor
from tests.fakegpu import MIB, FakeGpu, read
from tests.integration.pool.test_devices import Room, opened
from tests.poolroom import descriptors, until

SIZES = (2 * MIB, 4 * MIB, 6 * MIB, 2 * MIB, 4 * MIB)
ENGINES, CYCLES = 5, 12


async def brought(room: Room, first: int) -> str:
    """A set whose segments are full of `first`, `first` + 1, ..."""
    tensors = tuple(
        Tensor(name=f"t{number}", dtype="U8", shape=(size,), segment=number, offset=0, size_bytes=size)
        for number, size in enumerate(SIZES)
    )

    def write(fds: list[int]) -> None:
        for number, (fd, size) in enumerate(zip(fds, SIZES, strict=True)):
            os.pwrite(fd, bytes([first + number]) * size, 0)

    request = room.request(segments=SIZES, host_segments=0, tensors=tensors, form=f"from {first}")
    return (await asyncio.to_thread(deposit, room.socket, request, write)).weight_set


def addresses(chance: random.Random) -> Groups:
    numbers, groups = list(range(len(SIZES))), list[list[int]]()
    chance.shuffle(numbers)
    for number in numbers:
        if groups and chance.random() < 0.6:
            groups[-1].append(number)
        else:
            groups.append([number])
    return tuple(tuple(group) for group in groups) if chance.random() < 0.8 else ()


def see(attached: Attached, fds: list[int], first: int) -> None:
    assert sorted(number for group in attached.covered for number in group) == list(range(len(SIZES)))
    for group, fd in zip(attached.covered, fds, strict=True):
        at = 0
        for number in group:
            expected = bytes([first + number])
            assert read(fd, at, 1) == read(fd, at + SIZES[number] - 1, 1) == expected
            at += SIZES[number]


class Dies(Exception):
    pass


class Engine:
    def __init__(self, room: Room, firsts: dict[str, int], seed: int) -> None:
        self._room, self._firsts, self._chance = room, firsts, random.Random(seed)

    async def run(self) -> None:
        for _ in range(CYCLES):
            self._room.gpu.failing = self._chance.random() < 0.05
            try:
                await self._cycle()
            except (Dies, PoolRefused, Spoiled):
                continue

    async def _cycle(self) -> None:
        weight_set, other = self._chance.sample(list(self._firsts), 2)
        dies = self._chance.random() < 0.15

        def mapped(attached: Attached, fds: list[int]) -> None:
            if dies:
                raise Dies

        lie = addresses(self._chance)
        has = await asyncio.to_thread(attach_device, self._room.socket, weight_set, "GPU-fake", mapped, neighbours=lie)
        see(has.attached, has.fds, self._firsts[weight_set])
        if self._chance.random() < 0.4:
            has, weight_set = await self._switched(has, weight_set, other)
        see(has.attached, has.fds, self._firsts[weight_set])
        if self._chance.random() < 0.2:
            has.close()
        else:
            await asyncio.to_thread(has.release)

    async def _switched(self, has: DeviceAttachment, weight_set: str, other: str) -> tuple[DeviceAttachment, str]:
        fds, has.fds = has.fds, []
        try:
            has, weight_set = await asyncio.to_thread(exchange, has, other), other
        except PoolRefused:
            pass
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        has.fds = fds
        return has, weight_set


@pytest.mark.parametrize("seed", range(3))
async def test_each_sees_its_own_and_nothing_stays(tmp_path: Path, seed: int) -> None:
    async with opened(tmp_path, FakeGpu(total_bytes=2048 * MIB)) as room:
        firsts = {await brought(room, first): first for first in (1, 101)}
        await until(lambda: not room.server._connections)  # the deposits' ends are heard
        before = descriptors()
        async with asyncio.timeout(60):
            await asyncio.gather(*(Engine(room, firsts, seed * ENGINES + number).run() for number in range(ENGINES)))
        await until(lambda: room.gpu.blocks == {})
        device = (await room.described()).devices[0]
        assert (device.resident_bytes, device.sets) == (0, {})
        await until(lambda: descriptors() <= before)
