"""Memory made ready ahead of need, in a real daemon: it is there, it is used, it gives way, and then nothing runs."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pool.arena import READY
from pool.client import PoolRefused
from tests.poolroom import MIB, Daemon, wait_for

Source = Callable[..., Path]


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    """Not started yet."""
    made = Daemon(directory, budget=64 * MIB, extra=("--ready", str(20 * MIB)))
    yield made
    if made.process is not None and made.process.poll() is None:
        assert made.stop() == 0


def files(daemon: Daemon) -> dict[int, int]:
    """Inode -> bytes."""
    found = [path.stat() for path in (daemon.root / READY).glob("*")]
    return {state.st_ino: state.st_size for state in found}


async def ready_bytes(daemon: Daemon) -> int:
    async with daemon.client() as client:
        return (await client.describe()).ready_bytes


def ahead(daemon: Daemon, count: int) -> None:
    wait_for(lambda: len(daemon.events("ready_ahead")) >= count)


async def test_the_next_set_of_a_size_comes_into_memory_that_lies_ready(daemon: Daemon, source: Source) -> None:
    daemon.start()
    async with daemon.client() as client:
        first = await client.stage(source("first", 1, 8 * MIB))
        ahead(daemon, 2)  # at the start, and after the staging
        assert await ready_bytes(daemon) == first.size_bytes
        made = set(files(daemon))
        second = await client.stage(source("second", 2, 8 * MIB))
        used = {path.stat().st_ino for path in (daemon.root / second.weight_set).glob("*.segment")}
        assert used == made
        assert (await client.verify(second.weight_set)).bad == ()
        described = await client.describe()
        assert described.used_bytes == first.size_bytes + second.size_bytes
    assert daemon.stop() == 0
    assert not (daemon.root / READY).exists()


async def test_what_leaves_is_kept_for_what_comes_and_shows_nothing_of_itself(daemon: Daemon, source: Source) -> None:
    daemon.start()
    async with daemon.client() as client:
        first = await client.stage(source("first", 1, 8 * MIB))
        inodes = {path.stat().st_ino for path in (daemon.root / first.weight_set).glob("*.segment")}
        ahead(daemon, 2)  # at the start, and after the staging
        await client.drop(first.weight_set)
        assert inodes <= set(files(daemon))
        tensors = {"a": np.full(3 * MIB + 5, 7, np.uint8), "b": np.full(4 * MIB, 9, np.uint8)}
        second = await client.stage(source("second", tensors=tensors))
        assert (await client.verify(second.weight_set)).bad == ()
        bytes_ = b"".join(path.read_bytes() for path in sorted((daemon.root / second.weight_set).glob("*.segment")))
    assert set(bytes_) == {0, 7, 9}, "between tensors there is nothing of the set before"
    daemon.stop()


async def test_it_makes_room_for_a_set_that_needs_the_budget(daemon: Daemon, source: Source) -> None:
    daemon.start()
    async with daemon.client() as client:
        await client.stage(source("first", 1, 16 * MIB))
        ahead(daemon, 2)
        assert await ready_bytes(daemon) >= 16 * MIB
        with pytest.raises(PoolRefused, match="over_budget"):
            await client.stage(source("too large", 3, 60 * MIB))
        large = await client.stage(source("large", 2, 44 * MIB))
        assert (await client.verify(large.weight_set)).bad == ()
        assert await ready_bytes(daemon) <= 64 * MIB - 60 * MIB
    daemon.stop()


async def test_the_next_daemon_takes_it_over(daemon: Daemon, source: Source) -> None:
    daemon.start()
    async with daemon.client() as client:
        await client.stage(source("first", 1, 8 * MIB))
    ahead(daemon, 2)
    before = files(daemon)
    daemon.kill()
    daemon.start()
    ahead(daemon, 3)
    assert files(daemon) == before
    daemon.stop()


async def test_an_idle_daemon_spends_nothing(daemon: Daemon, source: Source) -> None:
    daemon.start()
    async with daemon.client() as client:
        await client.stage(source("first", 1, 8 * MIB))
    ahead(daemon, 2)

    def ticks() -> int:
        fields = Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    wait_for(lambda: daemon.events("checked"))
    before, switches = ticks(), os.sysconf("SC_CLK_TCK")
    words = len(daemon.events("ready_ahead"))
    async with daemon.client() as client:
        for _ in range(20):
            await client.describe()
    assert ticks() - before < switches, "asking twenty times costs no second"
    assert len(daemon.events("ready_ahead")) == words
    daemon.stop()
