"""Memory that lies ready, and a set that comes to nothing."""

import asyncio
import errno
import os
from collections import Counter
from pathlib import Path

import pytest

from pool.arena import READY, Arena
from pool.devices import Devices
from pool.numa import MemoryNode
from pool.placement import RESERVE_BYTES
from pool.ready import Ready
from pool.way import Way
from tests.poolroom import until

MIB = 1 << 20


async def test_memory_that_can_not_grow_lies_ready_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no more")

    (tmp_path / READY).mkdir()
    with (tmp_path / READY / "left").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    arena = Arena(tmp_path)
    ready = Ready(arena, Devices(arena, Way()), Way(), lambda: 2 * MIB)
    ready.start(())
    draft = arena.begin((3 * MIB,), {})
    draft.use(await ready.claim((3 * MIB,), free_bytes=4 * MIB))
    assert ready.size_bytes == 0
    monkeypatch.setattr("pool.spares.allocate", full)
    with pytest.raises(OSError, match="no more"):
        draft.allocate(0)
    await ready.take_back(draft)
    draft.discard()
    assert ready.size_bytes == 2 * MIB
    assert [path.stat().st_size for path in (tmp_path / READY).iterdir()] == [2 * MIB]
    found = await ready.claim((2 * MIB,), free_bytes=4 * MIB)
    assert os.fstat(found[0].fd).st_size == 2 * MIB, "its descriptor is open: it was not the draft's to close"
    os.close(found[0].fd)
    await ready.close()


async def test_memory_on_a_node_that_is_not_wanted_goes_and_where_nothing_is_planned_it_stays(tmp_path: Path) -> None:
    (tmp_path / READY).mkdir()
    for number in range(3):
        with (tmp_path / READY / str(number)).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    arena = Arena(tmp_path)
    ready = Ready(arena, Devices(arena, Way()), Way(), lambda: 6 * MIB)
    ready.start(())
    for number, spare in enumerate(ready._spares):
        spare.node = min(number, 1)
    assert ready.node_bytes == {0: 2 * MIB, 1: 4 * MIB}
    for planned, left in (((), 4 * MIB), ((None,), 2 * MIB), ((0,), 0)):
        for spare in (await ready.claim((2 * MIB,), planned, free_bytes=8 * MIB)).values():
            os.close(spare.fd)
        assert ready.size_bytes == left
    await ready.close()


async def test_what_is_made_ahead_lies_where_the_kernel_says_and_not_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(tmp_path)
    asked: list[int | None] = []
    monkeypatch.setattr(arena.nodes, "prefer", lambda fd, size, node: asked.append(node))
    monkeypatch.setattr(arena.nodes, "found", lambda fds, sizes: (1,) if os.fstat(fds[0]).st_blocks else ())
    ready = Ready(arena, Devices(arena, Way()), Way(), lambda: 2 * MIB)
    ready.start(())
    assert not await ready.claim((2 * MIB,), (0,), free_bytes=8 * MIB)
    await until(lambda: ready.size_bytes == 2 * MIB)
    assert (asked, ready.node_bytes) == ([0], {1: 2 * MIB}), "node 0 had no more"
    await ready.close()


async def test_memory_makes_way_on_the_node_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / READY).mkdir()
    for number in range(4):
        with (tmp_path / READY / str(number)).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    arena = Arena(tmp_path)
    left = {0: RESERVE_BYTES + MIB, 1: RESERVE_BYTES + 64 * MIB}
    nodes = [MemoryNode(number=number, total_bytes=64 << 30, free_bytes=free) for number, free in left.items()]
    monkeypatch.setattr(arena.nodes, "nodes", lambda: nodes)
    ready = Ready(arena, Devices(arena, Way()), Way(), lambda: 8 * MIB)
    ready.start(())
    for number, spare in enumerate(ready._spares):
        spare.node = number // 2
    assert not await ready.claim((5 * MIB,), (1,), free_bytes=16 * MIB)
    assert ready.node_bytes == {0: 4 * MIB, 1: 4 * MIB}, "there is room on that one"
    assert not await ready.claim((5 * MIB,), (0,), free_bytes=16 * MIB)
    assert ready.node_bytes == {1: 4 * MIB}
    await ready.close()


async def test_two_stagings_at_once_make_way_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / READY).mkdir()
    for number in range(2):
        with (tmp_path / READY / str(number)).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 2 * MIB)
    arena = Arena(tmp_path)
    ready = Ready(arena, Devices(arena, Way()), Way(), lambda: 4 * MIB)
    ready.start(())
    loop, other = asyncio.get_running_loop(), list[int]()

    def room() -> int:
        """The host has none; and while that is looked up, another staging takes all that lies ready."""
        if not other:
            claimed = asyncio.run_coroutine_threadsafe(ready.claim((2 * MIB, 2 * MIB), free_bytes=8 * MIB), loop).result(30)
            other.extend(spare.fd for spare in claimed.values())
        return 0

    monkeypatch.setattr(arena, "room", room)
    await ready._make_way(Counter({None: 3 * MIB}), 8 * MIB)
    assert (len(other), ready.size_bytes) == (2, 0)
    for fd in other:
        os.close(fd)
    await ready.close()


async def test_memory_is_made_ready_again_after_a_step_that_fails_for_whatever_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pool.ready.SETTLE_S", 0.0)
    arena, faults = Arena(tmp_path), [ValueError("a fault of ours"), OSError(errno.ENOSPC, "no more")]
    ready = Ready(arena, Devices(arena, Way()), Way(), lambda: 2 * MIB)
    make = ready._make

    async def breaks(size: int) -> None:
        if faults:
            raise faults.pop()
        await make(size)

    monkeypatch.setattr(ready, "_make", breaks)
    ready.start((2 * MIB,))
    for left in (1, 0):
        await until(lambda left=left: len(faults) == left)  # type: ignore[misc]
        ready._changed.set()
    await until(lambda: ready.size_bytes == 2 * MIB)
    await ready.close()
