"""What survives which death: sets, mappings, references; and what must not: leftovers."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pool.client import PoolClient, PoolEnds, PoolRefused, attach
from pool.mapping import Reservation
from pool.messages import Staged, Tensor
from tests.poolroom import DEADLINE_S, MIB, Daemon, remove, until, wait_for

Source = Callable[..., Path]
LARGE = 96 * MIB
"""At half a second a chunk it takes long enough for whatever is done meanwhile, also where the machine is busy."""


async def test_an_engine_outlives_the_daemon_and_is_known_to_the_next(daemon: Daemon, source: Source) -> None:
    async with daemon.client() as client:
        staged = await client.stage(source(size=32 * MIB))
    attachment = await asyncio.to_thread(attach, daemon.socket, staged.weight_set)
    reservation = Reservation(staged.size_bytes)
    reservation.attach(attachment.fds, attachment.attached.segments)
    attachment.close_fds()
    view = reservation.view(0, attachment.attached.tensors[0].size_bytes)
    before = int(view.sum(dtype=np.uint64))

    daemon.kill()
    assert int(view.sum(dtype=np.uint64)) == before
    daemon.start()
    async with daemon.client() as client:
        async with asyncio.timeout(DEADLINE_S):
            while not (await client.describe()).sets[0].mapped_by:
                await asyncio.sleep(0.005)
        assert attachment.refused is None
        with pytest.raises(PoolRefused, match="in_use"):
            await client.drop(staged.weight_set)
        assert (await client.stage(source(size=32 * MIB))).weight_set == staged.weight_set
        assert (await client.verify(staged.weight_set)).bad == ()
        reservation.detach()
        await asyncio.to_thread(attachment.close)
        async with asyncio.timeout(DEADLINE_S):
            while (await client.describe()).sets[0].mapped_by:
                await asyncio.sleep(0.005)
        await client.drop(staged.weight_set)


async def test_files_unchanged_are_not_read_again_by_the_next_daemon(daemon: Daemon, source: Source) -> None:
    path = source()
    async with daemon.client() as client:
        staged = await client.stage(path)
    assert daemon.stop() == 0
    daemon.start()
    async with daemon.client() as client:
        again = await client.stage(path)
    assert (again.weight_set, again.read_bytes) == (staged.weight_set, 0)


async def begun(daemon: Daemon, client: PoolClient, path: Path) -> "asyncio.Task[Staged]":
    """A staging of which something lies in the place already, and that is far from its end."""
    staging = asyncio.create_task(client.stage(path))
    await until(daemon.kept)
    return staging


async def test_a_death_while_staging_leaves_nothing(slow_daemon: Daemon, slow: Path, source: Source) -> None:
    path, daemon = source(size=LARGE), slow_daemon
    async with daemon.client() as client:
        staging = await begun(daemon, client, path)
        daemon.kill()
        with pytest.raises(ConnectionError):
            await staging
    assert daemon.kept()
    slow.unlink()
    daemon.start()
    assert daemon.kept() == []
    async with daemon.client() as client:
        assert (await client.describe()).used_bytes == 0
        assert (await client.stage(path)).read_bytes


async def test_an_ordered_end_while_staging_leaves_nothing(slow_daemon: Daemon, source: Source) -> None:
    daemon = slow_daemon
    async with daemon.client() as client:
        staging = await begun(daemon, client, source(size=LARGE))
        assert await asyncio.to_thread(daemon.stop) == 0
        with pytest.raises(ConnectionError):
            await staging
    assert daemon.kept() == []
    assert not daemon.socket.exists()


async def test_forget_frees_everything(directory: Path, source: Source) -> None:
    daemon = Daemon(directory, extra=("--forget",)).start()
    root = daemon.root
    async with daemon.client() as client:
        await client.stage(source())
    assert daemon.stop() == 0
    assert not root.exists()


def spoil(daemon: Daemon, weight_set: str, tensor: Tensor) -> None:
    segment = daemon.root / weight_set / f"{tensor.segment:05d}.segment"
    segment.chmod(0o600)
    with segment.open("r+b") as file:
        file.seek(tensor.offset + tensor.size_bytes // 2)
        flipped = file.read(1)[0] ^ 0x40
        file.seek(-1, 1)
        file.write(bytes([flipped]))


async def test_one_flipped_bit_is_found_and_the_set_goes_when_its_holder_goes(daemon: Daemon, source: Source) -> None:
    path = source()
    async with daemon.client() as client, daemon.client() as other:
        staged = await client.stage(path)
        attachment = await asyncio.to_thread(attach, daemon.socket, staged.weight_set)
        spoilt = attachment.attached.tensors[2]
        spoil(daemon, staged.weight_set, spoilt)
        assert (await client.verify(staged.weight_set)).bad == (spoilt.name,)
        assert (await client.describe()).sets[0].bad == (spoilt.name,)
        with pytest.raises(PoolRefused) as refused:
            await other.attach(staged.weight_set)
        assert refused.value.code == "corrupt"
        await asyncio.to_thread(attachment.close)
        async with asyncio.timeout(DEADLINE_S):
            while (described := await client.describe()).sets:
                await asyncio.sleep(0.005)
        assert [(gone.weight_set, gone.bad) for gone in described.dropped] == [(staged.weight_set, (spoilt.name,))]
        await until(lambda: daemon.kept() == [])
        with pytest.raises(PoolRefused, match="corrupt"):
            await client.attach(staged.weight_set)
        assert (await client.stage(path)).read_bytes
        assert (await client.verify(staged.weight_set)).bad == ()
        assert (await client.describe()).dropped == ()


async def test_a_corrupt_set_that_is_held_is_replaced_by_staging_it_again(daemon: Daemon, source: Source) -> None:
    path = source()
    async with daemon.client() as client:
        staged = await client.stage(path)
        attachment = await asyncio.to_thread(attach, daemon.socket, staged.weight_set)
        spoil(daemon, staged.weight_set, attachment.attached.tensors[0])
        await client.verify(staged.weight_set)
        again = await client.stage(path)
        assert (again.weight_set, again.read_bytes) == (staged.weight_set, staged.read_bytes)
        assert (await client.verify(staged.weight_set)).bad == ()
        await asyncio.to_thread(attachment.close)


async def test_a_set_spoilt_between_two_daemons_is_dropped_by_the_second(daemon: Daemon, source: Source) -> None:
    async with daemon.client() as client:
        good = await client.stage(source("good", 1))
        spoilt = await client.stage(source("spoilt", 2))
        attached, fds = await client.attach(spoilt.weight_set)
    for fd in fds:
        os.close(fd)
    daemon.kill()
    spoil(daemon, spoilt.weight_set, attached.tensors[0])
    (daemon.root / "ws_unfinished").mkdir()
    cut = daemon.root / good.weight_set / "00000.segment"
    daemon.start()
    wait_for(lambda: daemon.events("checked") and daemon.events("corrupt"))
    async with daemon.client() as client:
        described = await client.describe()
        assert [held.weight_set for held in described.sets] == [good.weight_set]
        assert [gone.weight_set for gone in described.dropped] == [spoilt.weight_set]
    assert not (daemon.root / "ws_unfinished").exists()

    daemon.kill()
    cut.chmod(0o600)
    with cut.open("r+b") as file:
        file.truncate(4096)
    daemon.start()
    async with daemon.client() as client:
        assert (await client.describe()).sets == ()


def test_one_daemon_a_directory(daemon: Daemon) -> None:
    arguments = ["--socket", str(daemon.socket) + "2", "--directory", str(daemon.directory), "--budget", "1"]
    second = subprocess.run(
        [sys.executable, "-m", "pool.daemon", *arguments], capture_output=True, timeout=DEADLINE_S, check=False
    )
    assert second.returncode == 2
    assert f"pool daemon {daemon.pid} holds".encode() in second.stderr


def test_it_says_why_it_does_not_start(directory: Path) -> None:
    arguments = ["--directory", str(directory), "--budget", "1", "--socket"]
    long = subprocess.run(
        [sys.executable, "-m", "pool.daemon", *arguments, f"/tmp/{'x' * 120}"],
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert long.returncode == 2
    assert b"107 at most" in long.stderr
    directory.chmod(0o755)
    open_to_all = subprocess.run(
        [sys.executable, "-m", "pool.daemon", *arguments, str(directory / "s")],
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert open_to_all.returncode == 2
    assert b"mode 0700" in open_to_all.stderr
    directory.chmod(0o700)


async def test_segments_on_disk_when_shared_memory_is_not_wanted(directory: Path, source: Source) -> None:
    daemon = Daemon(directory, extra=("--no-shared-memory",)).start()
    async with daemon.client() as client:
        staged = await client.stage(source())
        assert (directory / "segments" / staged.weight_set / "manifest.json").exists()
        assert (await client.verify(staged.weight_set)).bad == ()
        attachment = await asyncio.to_thread(attach, daemon.socket, staged.weight_set)
        reservation = Reservation(staged.size_bytes)
        reservation.attach(attachment.fds, attachment.attached.segments)
        await asyncio.to_thread(attachment.close)
        async with asyncio.timeout(DEADLINE_S):
            while (await client.describe()).sets[0].mapped_by:
                await asyncio.sleep(0.005)
        with pytest.raises(PoolRefused, match="in_use"):
            await client.drop(staged.weight_set)
        reservation.detach()
        await client.drop(staged.weight_set)
    assert daemon.stop() == 0


# ---- its directory, removed under it ------------------------------------------------------------------------


async def test_a_daemon_whose_directory_is_removed_says_so_and_ends_and_the_next_one_brings_sets_again(
    daemon: Daemon, source: Source
) -> None:
    path, root = source(size=8 * MIB), daemon.root
    async with daemon.client() as client:
        staged = await client.stage(path)
        attachment = await asyncio.to_thread(attach, daemon.socket, staged.weight_set)
        reservation = Reservation(staged.size_bytes)
        reservation.attach(attachment.fds, attachment.attached.segments)
        view = reservation.view(0, attachment.attached.tensors[0].size_bytes)
        before = int(view.sum(dtype=np.uint64))
        await asyncio.to_thread(remove, root)
        with pytest.raises(ConnectionError, match=f"{root} was removed") as ends:  # to whoever asks it is as good as dead
            await client.stage(source("another", 1))
        assert isinstance(ends.value, PoolEnds)
    assert daemon.process is not None
    assert await asyncio.to_thread(daemon.process.wait, DEADLINE_S) == 3
    assert len(daemon.events("place_lost")) == 1
    assert int(view.sum(dtype=np.uint64)) == before
    daemon.start()
    async with daemon.client() as client:
        again = await client.stage(path)
        assert (again.weight_set, again.read_bytes) == (staged.weight_set, staged.read_bytes)
        assert (await client.verify(staged.weight_set)).bad == ()
    assert int(view.sum(dtype=np.uint64)) == before
    reservation.detach()
    await asyncio.to_thread(attachment.close)


@pytest.mark.parametrize("anew", [False, True], ids=["removed", "made anew"])
def test_a_daemon_of_which_nobody_wants_anything_notices_too(daemon: Daemon, anew: bool) -> None:
    root = daemon.root
    remove(root)
    if anew:
        root.mkdir(mode=0o700)
    assert daemon.process is not None
    assert daemon.process.wait(DEADLINE_S) == 3
    assert [event["segments"] for event in daemon.events("place_lost")] == [str(root)]


async def test_whoever_waits_for_a_staging_as_the_directory_goes_can_ask_the_next_daemon(
    slow_daemon: Daemon, slow: Path, source: Source
) -> None:
    path, daemon = source(size=LARGE), slow_daemon
    async with daemon.client() as client:
        staging = await begun(daemon, client, path)
        await asyncio.to_thread(remove, daemon.root)
        slow.unlink()
        with pytest.raises(ConnectionError):
            await staging
    assert daemon.process is not None
    assert await asyncio.to_thread(daemon.process.wait, DEADLINE_S) == 3
    daemon.start()
    async with daemon.client() as client:
        assert (await client.stage(path)).read_bytes
