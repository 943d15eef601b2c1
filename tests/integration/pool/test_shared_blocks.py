"""Segments that lie side by side in an engine share one allocation; engines whose segments lie otherwise get their own."""

import asyncio
import os
import unittest.mock
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pool.client import PoolClient, PoolRefused, replies
from pool.devicelink import DeviceAttachment, attach_device, deposit, exchange
from pool.fill import RESERVE_BYTES
from pool.gpu import Block
from pool.manifest import segment_name
from pool.messages import Attach, Attached, Filled, Tensor
from pool.wire import Channel, close_all
from tests.fakegpu import MIB, FakeGpu, read
from tests.integration.pool.test_devices import SHARED, Room, opened, two_sets
from tests.poolroom import until

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


async def test_what_is_brought_ahead_of_an_engine_lies_as_in_the_one_before(side: Room) -> None:
    weight_set = await side.deposit()
    await asyncio.to_thread((await attach(side, weight_set, (0, 1))).release)
    ahead = await attach(side, weight_set)
    assert ahead.attached.blocks == ((0, 1),)
    engine = await attach(side, weight_set, (0, 1))
    assert engine.filled is not None and engine.filled.path == "resident"
    for one in (ahead, engine):
        await asyncio.to_thread(one.release)
    assert side.gpu.blocks == {}


async def test_an_engine_whose_segments_lie_otherwise_shares_what_it_can_map_and_has_the_rest_for_itself(side: Room) -> None:
    weight_set = await side.deposit()
    first = await attach(side, weight_set, (0,), (1,))
    whole = await attach(side, weight_set, (0, 1))
    assert whole.filled is not None and whole.filled.path == "resident", "each of its segments can be mapped alone"
    for one in (first, whole):
        await asyncio.to_thread(one.release)
    first = await attach(side, weight_set, (0, 1))
    other = await attach(side, weight_set, (1, 0))
    assert other.filled is not None
    assert (other.attached.blocks, other.filled.copied_bytes) == (((1, 0),), WHOLE), "there is nothing that it can share"
    assert (await side.described()).devices[0].resident_bytes == 2 * WHOLE, "both are told"
    again = await attach(side, weight_set, (0, 1))
    assert again.filled is not None and again.filled.path == "resident"
    for one in (other, first, again):
        await asyncio.to_thread(one.release)
    assert side.gpu.blocks == {}


async def three(room: Room, after: int = 0) -> str:
    """A set of three segments on the device, each full of its own number, from one more than `after` on."""
    sizes = (2 * MIB, 4 * MIB, 6 * MIB)
    tensors = tuple(
        Tensor(name=f"t{number}", dtype="U8", shape=(size,), segment=number, offset=0, size_bytes=size)
        for number, size in enumerate(sizes)
    )
    request = room.request(segments=sizes, host_segments=0, tensors=tensors, form=f"three {after}")

    def write(fds: list[int]) -> None:
        for number, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
            os.pwrite(fd, bytes([after + number + 1]) * size, 0)

    return (await asyncio.to_thread(deposit, room.socket, request, write)).weight_set


async def test_of_what_two_engines_can_map_there_is_one_copy_and_what_only_one_can_goes_with_it(side: Room) -> None:
    weight_set = await three(side)
    first = await attach(side, weight_set, (0, 1), (2,))
    second = await attach(side, weight_set, (1, 2), (0,))
    assert second.filled is not None
    assert second.attached.blocks == ((0,), (1,), (2,))
    assert second.filled.copied_bytes == 6 * MIB, "the third segment is shared"
    assert [read(fd, 0, 16) for fd in second.fds] == [bytes([number]) * 16 for number in (1, 2, 3)]
    assert (await side.described()).devices[0].resident_bytes == 18 * MIB
    released = await asyncio.to_thread(first.release)
    assert released is not None and released.freed_bytes == 6 * MIB, "the second has the rest"
    assert (await side.described()).devices[0].resident_bytes == 12 * MIB
    assert (await side.described()).devices[0].sets == {weight_set: 1}
    third = await attach(side, weight_set, (1, 2), (0,))
    assert third.filled is not None and third.filled.path == "resident"
    assert [read(fd, 0, 16) for fd in third.fds] == [bytes([number]) * 16 for number in (1, 2, 3)]
    for one, freed in ((second, 0), (third, 12 * MIB)):
        released = await asyncio.to_thread(one.release)
        assert released is not None and released.freed_bytes == freed
    assert side.gpu.blocks == {}


async def test_while_two_share_what_a_third_had_nothing_of_it_goes(side: Room) -> None:
    weight_set = await three(side)
    first, *others = [await attach(side, weight_set, *lie) for lie in (((0, 1), (2,)), ((1, 2), (0,)), ((0,), (1,), (2,)))]
    for one, freed in ((first, 0), (others[0], 12 * MIB), (others[1], 12 * MIB)):
        released = await asyncio.to_thread(one.release)
        assert released is not None and released.freed_bytes == freed
    assert side.gpu.blocks == {}


async def test_what_was_brought_ahead_for_other_addresses_goes_once_the_engine_has_its_own(side: Room) -> None:
    weight_set = await three(side)
    await asyncio.to_thread((await attach(side, weight_set, (0, 1), (2,))).release)
    ahead = await attach(side, weight_set)
    side.gpu.gate.clear()
    coming = asyncio.create_task(attach(side, weight_set, (1, 2), (0,)))
    await until(lambda: len(side.gpu.blocks) == 4)
    leaving = asyncio.create_task(asyncio.to_thread(ahead.release))
    await until(lambda: side.gpu.queued_bytes == 6 * MIB)
    side.gpu.gate.set()
    released = await leaving
    assert released is not None and released.freed_bytes == 6 * MIB
    engine = await coming
    assert [read(fd, 0, 16) for fd in engine.fds] == [bytes([number]) * 16 for number in (1, 2, 3)]
    assert (await side.described()).devices[0].resident_bytes == 12 * MIB
    await asyncio.to_thread(engine.release)
    assert side.gpu.blocks == {}


async def test_what_is_brought_ahead_takes_no_memory_twice_whichever_of_the_engines_before_comes(side: Room) -> None:
    weight_set = await three(side)
    engines: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1), (2,)), ((1, 2), (0,)))
    for lie in engines:
        await asyncio.to_thread((await attach(side, weight_set, *lie)).release)
    side.gpu.foreign_bytes = side.gpu.total_bytes - RESERVE_BYTES - 12 * MIB
    for lie in engines:
        ahead = await attach(side, weight_set)
        engine = await attach(side, weight_set, *lie)
        assert engine.filled is not None and engine.filled.path == "resident"
        for one in (ahead, engine):
            await asyncio.to_thread(one.release)


async def test_an_heir_switches_in_place(side: Room) -> None:
    weight_set, other = await three(side), await three(side, 4)
    first = await attach(side, weight_set, (0, 1), (2,))
    engine = await attach(side, weight_set, (1, 2), (0,))
    with pytest.raises(PoolRefused, match="a part of another copy"):
        await asyncio.to_thread(exchange, engine, other)
    await asyncio.to_thread(first.release)
    switched = await asyncio.to_thread(exchange, engine, other)
    assert [read(fd, 0, 16) for fd in engine.fds] == [bytes([number]) * 16 for number in (5, 6, 7)]
    released = await asyncio.to_thread(switched.release)
    assert released is not None and released.freed_bytes == 12 * MIB
    assert side.gpu.blocks == {}


async def test_a_part_that_does_not_go_keeps_nothing_of_what_it_shared(side: Room) -> None:
    weight_set = await three(side)
    first = await attach(side, weight_set, (0, 1), (2,))
    second = await attach(side, weight_set, (1, 2), (0,))
    stuck = list(side.gpu.blocks)[-1]
    destroy = side.gpu.destroy

    def destroyed(block: Block) -> None:
        if block.handle == stuck:
            raise OSError(700, "the driver refuses")
        destroy(block)

    with unittest.mock.patch.object(side.gpu, "destroy", destroyed):
        assert await asyncio.to_thread(second.release) is None
        await until(lambda: len(side.gpu.blocks) == 3)
        released = await asyncio.to_thread(first.release)
    assert released is not None and released.freed_bytes == 12 * MIB
    assert list(side.gpu.blocks) == [stuck]
    destroy(side.gpu.blocks[stuck])


async def test_an_engine_that_dies_gives_up_its_part_and_what_it_shared(side: Room) -> None:
    weight_set = await three(side)
    first = await attach(side, weight_set, (0, 1), (2,))
    second = await attach(side, weight_set, (1, 2), (0,))
    second.channel.close()
    second.close()
    await until(lambda: len(side.gpu.blocks) == 2)
    released = await asyncio.to_thread(first.release)
    assert released is not None and released.freed_bytes == 12 * MIB
    assert side.gpu.blocks == {}


async def test_a_part_for_which_there_is_no_room_is_refused_and_shares_nothing(side: Room) -> None:
    weight_set = await three(side)
    first = await attach(side, weight_set, (0, 1), (2,))
    side.gpu.foreign_bytes = side.gpu.free_bytes() - RESERVE_BYTES - MIB
    with pytest.raises(PoolRefused, match=r"needs 6\.0 MiB") as refused:
        await attach(side, weight_set, (1, 2), (0,))
    assert refused.value.code == "device_full"
    released = await asyncio.to_thread(first.release)
    assert released is not None and released.freed_bytes == 12 * MIB


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


@pytest.mark.parametrize("made", [((0, 1), (2,)), ((2,), (0,), (1,))])
async def test_an_engine_that_was_built_before_there_were_blocks_gets_one_a_segment_in_order(
    side: Room, made: tuple[tuple[int, ...], ...]
) -> None:
    weight_set = await three(side)
    newer = await attach(side, weight_set, *made)
    older = await asyncio.to_thread(Channel.connect, str(side.socket), 10)
    await asyncio.to_thread(older.send, Attach(weight_set=weight_set, device="GPU-fake"), 10)
    attached = await asyncio.to_thread(older.receive, replies, 10)
    assert isinstance(attached, Attached)
    fds = await asyncio.to_thread(older.receive_fds, len(attached.segments), 10)
    assert isinstance(await asyncio.to_thread(older.receive, replies, 10), Filled)
    assert [read(fd, 0, 16) for fd in fds] == [bytes([number]) * 16 for number in (1, 2, 3)]
    close_all(fds)
    older.close()
    await asyncio.to_thread(newer.release)
    await until(lambda: side.gpu.blocks == {})


@pytest.mark.parametrize("wrong", [((0,),), ((0, 1), ())])
async def test_neighbours_that_are_no_such_set_are_refused(side: Room, wrong: tuple[tuple[int, ...], ...]) -> None:
    weight_set = await side.deposit()
    with pytest.raises(PoolRefused, match="each of 2 segments once") as refused:
        await attach(side, weight_set, *wrong)
    assert refused.value.code == "bad_layout"
    await asyncio.to_thread((await attach(side, weight_set, (0, 1))).release)


async def test_engines_that_share_a_set_found_corrupt_keep_it_and_nobody_else_gets_any_of_it(side: Room) -> None:
    weight_set = await three(side)
    first = await attach(side, weight_set, (0, 1), (2,))
    second = await attach(side, weight_set, (1, 2), (0,))
    with (side.path / "segments" / weight_set / segment_name(2)).open("r+b") as file:
        file.write(b"\0")
    async with await PoolClient.connect(side.socket) as client:
        assert (await client.verify(weight_set)).bad == ("t2",)
    assert await three(side) == weight_set, "its source was staged again"
    third = await attach(side, weight_set, (1, 2), (0,))
    assert third.filled is not None and third.filled.copied_bytes == 12 * MIB, "of the new bytes alone"
    released = await asyncio.to_thread(first.release)
    assert released is not None and released.freed_bytes == 6 * MIB
    again = await attach(side, weight_set, (1, 2), (0,))
    assert (read(again.fds[0], 0, 1), read(again.fds[1], 4 * MIB - 1, 2)) == (b"\1", b"\2\3")
    assert again.filled is not None and again.filled.path == "resident"
    for one, freed in ((again, 0), (second, 12 * MIB), (third, 12 * MIB)):
        released = await asyncio.to_thread(one.release)
        assert released is not None and released.freed_bytes == freed
    assert side.gpu.blocks == {}


async def test_a_copy_that_fails_takes_those_with_it_who_would_share_it(side: Room) -> None:
    weight_set = await three(side)
    side.gpu.gate.clear()
    coming = [asyncio.create_task(attach(side, weight_set, (0, 1), (2,)))]
    await until(lambda: len(side.gpu.blocks) == 2)
    coming.append(asyncio.create_task(attach(side, weight_set, (1, 2), (0,))))
    await until(lambda: side.gpu.queued_bytes == 12 * MIB)
    side.gpu.failing = True
    side.gpu.gate.set()
    for failed in await asyncio.gather(*coming, return_exceptions=True):
        assert isinstance(failed, PoolRefused) and failed.code == "failed"
    await until(lambda: side.gpu.blocks == {})
    side.gpu.failing = False
    sound = await attach(side, weight_set, (1, 2), (0,))
    assert (read(sound.fds[0], 0, 1), read(sound.fds[1], 4 * MIB - 1, 2)) == (b"\1", b"\2\3")
    assert (await side.described()).devices[0].resident_bytes == 12 * MIB
    await asyncio.to_thread(sound.release)
    assert side.gpu.blocks == {}


async def test_a_part_whose_copy_fails_leaves_what_it_would_have_shared_to_its_engine(side: Room) -> None:
    weight_set = await three(side)
    first = await attach(side, weight_set, (0, 1), (2,))
    side.gpu.failing = True
    with pytest.raises(PoolRefused, match="failed"):
        await attach(side, weight_set, (1, 2), (0,))
    side.gpu.failing = False
    await until(lambda: len(side.gpu.blocks) == 2)
    assert read(first.fds[1], 0, 16) == b"\3" * 16
    assert (await side.described()).devices[0].sets == {weight_set: 1}
    released = await asyncio.to_thread(first.release)
    assert released is not None and released.freed_bytes == 12 * MIB
    assert side.gpu.blocks == {}
