"""Memory that lies ready, and a set that comes to nothing."""

import errno
import os
from pathlib import Path

import pytest

from pool.arena import READY, Arena
from pool.devices import Devices
from pool.ready import Ready
from pool.way import Way

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
