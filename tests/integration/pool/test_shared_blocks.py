"""Segments that lie side by side in an engine share one allocation; engines whose segments lie otherwise get their own."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pool.client import PoolRefused
from pool.devicelink import DeviceAttachment, attach_device, exchange
from tests.fakegpu import MIB, FakeGpu, read
from tests.integration.pool.test_devices import SHARED, Room, opened, two_sets

WHOLE = SHARED + 2 * MIB


@pytest.fixture
async def side(tmp_path: Path) -> AsyncIterator[Room]:
    async with opened(tmp_path, FakeGpu()) as found:
        yield found


async def attach(room: Room, weight_set: str, *neighbours: tuple[int, ...]) -> DeviceAttachment:
    def mapped(attached: object, fds: list[int]) -> None:
        pass

    return await asyncio.to_thread(attach_device, room.socket, weight_set, "GPU-fake", mapped, neighbours=neighbours)


async def test_neighbours_come_in_one_block_in_the_engines_order(side: Room) -> None:
    weight_set = await side.deposit()
    attachment = await attach(side, weight_set, (1, 0))
    assert (attachment.attached.blocks, len(attachment.fds)) == (((1, 0),), 2)
    assert [block.size for block in side.gpu.blocks.values()] == [WHOLE]
    assert read(attachment.fds[0], 2 * MIB, SHARED) == side.weights
    assert read(attachment.fds[0], 512, MIB) == side.weights[:MIB]
    released = await asyncio.to_thread(attachment.release)
    assert released is not None
    assert released.freed_bytes == WHOLE
    assert side.gpu.blocks == {}


async def test_one_copy_serves_all_whose_segments_lie_alike_or_who_map_nothing(side: Room) -> None:
    weight_set = await side.deposit()
    first = await attach(side, weight_set, (0, 1))
    others = [await attach(side, weight_set, (0, 1)), await attach(side, weight_set)]
    assert [one.attached.blocks for one in others] == [((0, 1),)] * 2
    assert [one.filled.path for one in others if one.filled is not None] == ["resident"] * 2
    assert len(side.gpu.blocks) == 1
    for one in (first, *others):
        await asyncio.to_thread(one.release)
    assert side.gpu.blocks == {}


async def test_what_was_brought_for_nobodys_addresses_fits_all(side: Room) -> None:
    weight_set = await side.deposit()
    ahead = await attach(side, weight_set)
    engine = await attach(side, weight_set, (0, 1))
    assert engine.attached.blocks == ((0,), (1,))
    assert len(side.gpu.blocks) == 2
    for one in (ahead, engine):
        await asyncio.to_thread(one.release)


async def test_an_engine_whose_segments_lie_otherwise_has_a_copy_of_its_own(side: Room) -> None:
    weight_set = await side.deposit()
    first = await attach(side, weight_set, (0, 1))
    other = await attach(side, weight_set, (1, 0))
    assert (other.attached.blocks, other.filled and other.filled.copied_bytes) == (((1, 0),), WHOLE)
    assert (await side.described()).devices[0].resident_bytes == 2 * WHOLE, "both are told"
    again = await attach(side, weight_set, (0, 1))
    assert again.filled is not None and again.filled.path == "resident"
    for one in (other, first, again):
        await asyncio.to_thread(one.release)
    assert side.gpu.blocks == {}


async def test_a_switch_takes_the_place_of_the_blocks_that_are_there(side: Room) -> None:
    first, second = await two_sets(side)
    old = await attach(side, first, (1, 0))
    new = await asyncio.to_thread(exchange, old, second)
    assert new.attached.blocks == ((1, 0),)
    assert read(old.fds[0], 2 * MIB, SHARED) == side.weights
    assert len(side.gpu.blocks) == 1
    shares = await attach(side, second, (1, 0))
    assert shares.filled is not None and shares.filled.path == "resident"
    for one in (shares, new):
        await asyncio.to_thread(one.release)
    assert side.gpu.blocks == {}


async def test_neighbours_that_are_no_such_set_are_refused(side: Room) -> None:
    weight_set = await side.deposit()
    with pytest.raises(PoolRefused, match="each of 2 segments once") as refused:
        await attach(side, weight_set, (0,))
    assert refused.value.code == "bad_layout"
    await asyncio.to_thread((await attach(side, weight_set, (0, 1))).release)
