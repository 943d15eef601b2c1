"""Memory that lies ready, and a set that comes to nothing."""

import asyncio
import contextlib
import errno
import os
from collections import Counter
from pathlib import Path

import pytest

from pool.arena import READY, Arena
from pool.devices import Devices
from pool.manifest import Manifest, segment_name
from pool.numa import MemoryNode
from pool.placement import RESERVE_BYTES
from pool.ready import Ready
from pool.way import Way
from tests.fakegpu import FakeGpu
from tests.poolroom import until

MIB = 1 << 20


def lying(root: Path, *sizes: int) -> None:
    """An earlier daemon had this ready."""
    (root / READY).mkdir()
    for number, size in enumerate(sizes):
        with (root / READY / str(number)).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)


def open_in(root: Path) -> list[str]:
    """Files there that this process has open, removed ones included."""
    found = list[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was the listing's own
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(f"{root}/")]


async def test_memory_that_can_not_grow_lies_ready_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no more")

    lying(tmp_path, 2 * MIB)
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
    lying(tmp_path, *[2 * MIB] * 3)
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
    lying(tmp_path, *[2 * MIB] * 4)
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
    lying(tmp_path, *[2 * MIB] * 2)
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


def once_no_name(ready: Ready, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first file that is to be among those that lie ready can't be."""
    path, faults = ready._path, [OSError(errno.ENOSPC, "no inode is left")]

    def named() -> Path:
        if faults:
            raise faults.pop()
        return path()

    monkeypatch.setattr(ready, "_path", named)


async def test_what_can_not_be_taken_back_goes_with_its_draft_and_the_rest_lies_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(tmp_path, 2 * MIB, 2 * MIB, 2 * MIB)
    arena = Arena(tmp_path)
    ready = Ready(arena, Devices(arena, Way()), Way(), lambda: 6 * MIB)
    ready.start(())
    draft = arena.begin((2 * MIB,) * 3, {})
    draft.use(await ready.claim(draft.sizes, free_bytes=8 * MIB))
    draft.allocate(0)
    draft.allocate(1)
    once_no_name(ready, monkeypatch)
    await ready.take_back(draft)
    await ready.take_back(draft)  # twice is fine
    draft.discard()
    assert ready.size_bytes == 4 * MIB, "the second was moved, the third had not come into the draft"
    assert sorted(open_in(tmp_path)) == sorted(map(str, (tmp_path / READY).iterdir())), "each is open once"
    assert sorted(path.name for path in tmp_path.iterdir()) == [READY]
    await ready.close()
    assert open_in(tmp_path) == []


async def test_what_was_found_for_a_set_lies_ready_again_when_no_way_can_be_made_for_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying(tmp_path, 2 * MIB, 2 * MIB)
    arena = Arena(tmp_path)
    ready = Ready(arena, Devices(arena, Way()), Way(), lambda: 4 * MIB)
    ready.start(())

    def unseen() -> int:
        raise OSError(errno.EMFILE, "too many open files")

    room = arena.room
    monkeypatch.setattr(arena, "room", unseen)
    with pytest.raises(OSError, match="too many open files"):
        await ready.claim((2 * MIB, 5 * MIB), free_bytes=16 * MIB)
    monkeypatch.setattr(arena, "room", room)
    assert ready.size_bytes == 4 * MIB
    found = await ready.claim((2 * MIB, 2 * MIB), free_bytes=16 * MIB)
    assert len(found) == 2
    for spare in found.values():
        os.close(spare.fd)
    await ready.close()
    assert open_in(tmp_path) == []


@pytest.mark.parametrize("fault", ["its name", "the host's room"])
async def test_memory_of_a_set_that_can_not_be_kept_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    arena, faults = Arena(tmp_path), [OSError(errno.EMFILE, "too many open files")]

    def allowed() -> int:
        if fault == "the host's room" and faults:
            raise faults.pop()
        return 4 * MIB

    ready = Ready(arena, Devices(arena, Way()), Way(), allowed)
    (grave := tmp_path / "grave").mkdir()
    of = Manifest(weight_set="ws_1", layout_digest="", segments=(2 * MIB, 2 * MIB), tensors=(), origins=())
    for number in range(2):
        (grave / segment_name(number)).write_bytes(bytes(2 * MIB))
        (grave / segment_name(number)).chmod(0o400)
    if fault == "its name":
        once_no_name(ready, monkeypatch)
    await ready.recycle(grave, of, {})
    assert ready.size_bytes == 2 * MIB
    assert open_in(tmp_path) == [str(path) for path in (tmp_path / READY).iterdir()]
    assert [path.name for path in grave.iterdir()] == [segment_name(0)]
    await ready.close()
    assert open_in(tmp_path) == []


class Stubborn(FakeGpu):
    """Its driver unpins nothing."""

    def unregister(self, address: int) -> None:
        raise OSError(999, "CUDA_ERROR_UNKNOWN")


@pytest.mark.parametrize("leaves", ["while a set comes", "in the middle"])
async def test_what_makes_way_is_closed_and_removed_though_it_can_not_be_unpinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leaves: str
) -> None:
    monkeypatch.setattr("pool.ready.SETTLE_S", 0.0)
    lying(tmp_path, 2 * MIB)
    arena = Arena(tmp_path)
    devices = Devices(arena, Way(), [Stubborn()])
    ready = Ready(arena, devices, Way(), lambda: 2 * MIB)
    ready.start(())
    await until(lambda: ready.pinned_bytes == 2 * MIB)
    if leaves == "in the middle":  # of giving it up, whoever waits for that goes away

        async def cut_short(*_: object) -> None:
            raise asyncio.CancelledError

        monkeypatch.setattr(devices.host, "unpin", cut_short)
        with pytest.raises(asyncio.CancelledError):
            await ready._shed(ready._spares[0])
    else:
        assert not await ready.claim((5 * MIB,), free_bytes=0)
        assert "not_unpinned" in [record.message for record in caplog.records]
    assert ready.size_bytes == 0
    assert open_in(tmp_path) == []
    assert list((tmp_path / READY).iterdir()) == []
    await ready.close()
    await devices.close()
