"""What the daemon does for one client and for several, on real segments."""

import asyncio
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pool.client import PoolClient, PoolRefused, attach
from pool.mapping import Reservation
from pool.messages import Staging
from pool.wire import close_all, copied
from tests.poolroom import DEADLINE_S, MIB, Daemon, descriptors, until, write_safetensors

Source = Callable[..., Path]


async def test_a_staged_set_maps_as_the_arrays_that_were_saved(daemon: Daemon, source: Source) -> None:
    random = np.random.default_rng(1)
    saved = {
        "w.large": random.standard_normal((9, 1 << 20), dtype=np.float32),  # 36 MiB: aligned to a huge page
        "a.bias": random.standard_normal(7, dtype=np.float32),
        "z": random.integers(0, 1 << 16, (3, 5), dtype=np.uint16),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "scalar": np.array(5, dtype=np.int64),
    }
    words: list[Staging] = []
    async with daemon.client() as client:
        staged = await client.stage(source(tensors=saved), words.append)
        assert staged.read_bytes == sum(array.nbytes for array in saved.values())
        assert all(word.done_bytes <= word.total_bytes or not word.total_bytes for word in words)
        assert words
        attached, fds = await client.attach(staged.weight_set)
    reservation = Reservation(staged.size_bytes)
    reservation.attach(fds, attached.segments)
    close_all(fds)
    assert {tensor.name for tensor in attached.tensors} == set(saved)
    for tensor in attached.tensors:
        array = saved[tensor.name]
        view = reservation.view(reservation.start(tensor.segment) + tensor.offset, tensor.size_bytes)
        assert tensor.shape == array.shape
        assert np.array_equal(view.view(array.dtype).reshape(array.shape), array)
        assert (reservation.address + reservation.start(tensor.segment) + tensor.offset) % 64 == 0
    reservation.detach()


async def test_a_source_of_several_files_with_an_index(daemon: Daemon, tmp_path: Path) -> None:
    parts = {"b": np.arange(1000, dtype=np.float32), "a": np.arange(10, dtype=np.int64)}
    for name, array in parts.items():
        write_safetensors(tmp_path / f"{name}.safetensors", {name: array})
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in parts}}
    (tmp_path / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    async with daemon.client() as client:
        staged = await client.stage(tmp_path)
        attached, fds = await client.attach(staged.weight_set)
        assert [tensor.name for tensor in attached.tensors] == ["a", "b"]
        found = os.pread(fds[0], attached.tensors[1].size_bytes, attached.tensors[1].offset)
        close_all(fds)
        assert found == parts["b"].tobytes()


async def test_the_same_files_are_not_read_again_and_the_same_bytes_are_held_once(daemon: Daemon, source: Source) -> None:
    async with daemon.client() as client:
        one, two = source("one"), source("two")
        first = await client.stage(one)
        again = await client.stage(one)
        assert (again.weight_set, again.read_bytes) == (first.weight_set, 0)
        copied = await client.stage(two)
        assert copied.weight_set == first.weight_set
        assert copied.read_bytes == first.read_bytes
        assert (await client.stage(two)).read_bytes == 0
        described = await client.describe()
        assert [held.size_bytes for held in described.sets] == [described.used_bytes]


async def test_two_sources_at_once_and_attaching_meanwhile(daemon: Daemon, source: Source) -> None:
    async with daemon.client() as one, daemon.client() as two, daemon.client() as three:
        ready = await three.stage(source("ready"))
        under_way = asyncio.Event()
        jobs = [
            asyncio.create_task(one.stage(source("one", 1, 96 * MIB), lambda _: under_way.set())),
            asyncio.create_task(two.stage(source("two", 2, 96 * MIB))),
        ]
        await under_way.wait()
        _, fds = await three.attach(ready.weight_set, deadline_s=10.0)
        close_all(fds)
        staged = await asyncio.gather(*jobs)
        assert len({of.weight_set for of in staged}) == 2


async def test_one_source_asked_for_twice_at_once_is_read_once(daemon: Daemon, source: Source) -> None:
    path = source("one", 1, 64 * MIB)
    async with daemon.client() as one, daemon.client() as two:
        staged = await asyncio.gather(one.stage(path), two.stage(path))
        assert staged[0].weight_set == staged[1].weight_set
        assert 0 < (await one.describe()).used_bytes <= 65 * MIB


async def test_a_client_that_leaves_cancels_its_staging(slow_daemon: Daemon, slow: Path, source: Source) -> None:
    path, daemon = source("one", 1, 96 * MIB), slow_daemon
    async with daemon.client() as one, daemon.client() as two:
        staging = asyncio.create_task(one.stage(path))
        await until(daemon.kept)
        staging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await staging
        slow.unlink()
        await until(lambda: not daemon.kept())
        assert (await two.describe()).used_bytes == 0
        assert (await two.stage(path)).read_bytes > 0


async def test_a_budget_refuses_with_both_numbers(directory: Path, source: Source) -> None:
    daemon = Daemon(directory, budget=50 * MIB).start()
    one, two = source("one", 1, 30 * MIB), source("two", 2, 30 * MIB)
    async with daemon.client() as client:
        held = await client.stage(one)
        with pytest.raises(PoolRefused) as refused:
            await client.stage(two)
        assert refused.value.code == "over_budget"
        assert refused.value.need_bytes >= 30 * MIB
        assert refused.value.free_bytes == daemon.budget - held.size_bytes
        await client.drop(held.weight_set)
        assert (await client.stage(two)).read_bytes
    assert daemon.stop() == 0


async def test_a_set_that_is_mapped_is_not_dropped(daemon: Daemon, source: Source) -> None:
    async with daemon.client() as client:
        staged = await client.stage(source())
        attachment = attach(daemon.socket, staged.weight_set)
        with pytest.raises(PoolRefused, match="mapped by 1 connections"):
            await client.drop(staged.weight_set)
        reservation = Reservation(staged.size_bytes)
        reservation.attach(attachment.fds, attachment.attached.segments)
        attachment.close()
        await _until_unheld(client)
        # The reference is gone, the mapping is not: only the kernel's word counts.
        with pytest.raises(PoolRefused, match=f"processes {os.getpid()}") as refused:
            await client.drop(staged.weight_set)
        assert refused.value.code == "in_use"
        reservation.detach()
        assert (await client.drop(staged.weight_set)).sets == ()
        assert daemon.kept() == []
        with pytest.raises(PoolRefused, match="unknown_set"):
            await client.attach(staged.weight_set)


async def _until_unheld(client: PoolClient) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while any(held.mapped_by for held in (await client.describe()).sets):
            await asyncio.sleep(0.005)


async def test_a_dead_engine_gives_its_reference_back(daemon: Daemon, source: Source) -> None:
    program = (
        "import sys; from pool.client import attach; a = attach(*sys.argv[1:]); print('held', flush=True); sys.stdin.read()"
    )
    async with daemon.client() as client:
        staged = await client.stage(source())
        arguments = [sys.executable, "-c", program, str(daemon.socket), staged.weight_set]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
            assert await asyncio.to_thread(engine.stdout.readline) == b"held\n"
            assert (await client.describe()).sets[0].mapped_by == 1
            engine.kill()
        await _until_unheld(client)
        await client.drop(staged.weight_set)


async def test_descriptors_are_read_only(daemon: Daemon, source: Source) -> None:
    async with daemon.client() as client:
        staged = await client.stage(source())
        _, fds = await client.attach(staged.weight_set)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fds[0], b"x", 0)
        assert os.fstat(fds[0]).st_mode & 0o777 == 0o400
        close_all(fds)


async def test_two_engines_share_one_copy(daemon: Daemon, source: Source) -> None:
    size = 64 * MIB
    program = (
        "import sys; from pool.client import attach; from pool.mapping import Reservation\n"
        "a = attach(*sys.argv[1:]); segments = a.attached.segments\n"
        "r = Reservation(sum(segments)); r.attach(a.fds, segments, populate=True)\n"
        "print('mapped', flush=True); sys.stdin.readline()\n"
        "lines = dict(line.split(':', 1) for line in open('/proc/self/smaps_rollup').read().splitlines()[1:])\n"
        "print(lines['Rss'].split()[0], lines['Pss'].split()[0], flush=True); sys.stdin.read()"
    )
    async with daemon.client() as client:
        staged = await client.stage(source(size=size))
        arguments = [sys.executable, "-c", program, str(daemon.socket), staged.weight_set]
        engines = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
        for engine in engines:
            assert await asyncio.to_thread(engine.stdout.readline) == b"mapped\n"
        for engine in engines:
            engine.stdin.write(b"\n")
            engine.stdin.flush()
            rss, pss = map(int, (await asyncio.to_thread(engine.stdout.readline)).split())
            assert rss << 10 >= size
            assert (rss - pss) << 10 >= 0.45 * size  # half of the shared pages are counted to the other
        for engine in engines:
            engine.stdin.close()
            engine.wait(DEADLINE_S)
            engine.stdout.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_refused(daemon: Daemon) -> None:
    daemon.directory.chmod(0o711)
    daemon.socket.chmod(0o777)  # else the file's mode would refuse before the daemon can
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(sys.argv[1]); print(s.recv(999))"
    )
    answer = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-S", "-c", program, str(daemon.socket)], capture_output=True, check=True, cwd="/"
    )
    assert b"forbidden" in answer.stdout
    assert b"65534" in answer.stdout


async def test_nonsense_costs_only_its_connection(daemon: Daemon) -> None:
    for nonsense in (b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"abc", struct.pack("<I", 1) + b"\xc0", b"\1"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            sock.sendall(nonsense)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            assert sock.recv(100) == b""
    async with daemon.client() as client:
        assert (await client.describe()).sets == ()


async def test_a_bad_source_is_refused_by_name(daemon: Daemon, tmp_path: Path) -> None:
    async with daemon.client() as client:
        for path in (tmp_path, tmp_path / "missing", Path("relative")):
            with pytest.raises(PoolRefused, match="bad_source"):
                await client.stage(path)
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
        with pytest.raises(PoolRefused, match=r"bad_source.*header claims"):
            await client.stage(tmp_path)
        assert (await client.describe()).used_bytes == 0


async def test_nothing_leaks_over_200_cycles(directory: Path, source: Source) -> None:
    daemon = Daemon(directory, extra=("--ready", "0")).start()  # memory for the next set is a descriptor more, some time
    async with daemon.client() as client:
        staged = await client.stage(source())
        before = (0, 0)
        for cycle in range(200):
            attachment = await asyncio.to_thread(attach, daemon.socket, staged.weight_set)
            reservation = Reservation(staged.size_bytes)
            reservation.attach(attachment.fds, attachment.attached.segments)
            reservation.detach()
            attachment.close()
            if cycle == 10:
                await _until_unheld(client)
                before = (descriptors(), descriptors(daemon.pid))
        await _until_unheld(client)
        await until(lambda: descriptors() <= before[0] and descriptors(daemon.pid) <= before[1])
    assert daemon.stop() == 0


def test_a_daemon_may_have_as_many_descriptors_as_its_host_allows(directory: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    daemon = Daemon(directory)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        daemon.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    assert daemon.stop() == 0


def test_of_descriptors_all_are_copied_or_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file:
        close_all(copied([file.fileno(), file.fileno()]))
        before = descriptors()
        with pytest.raises(OSError, match="Bad file descriptor"):
            copied([file.fileno(), -1])
        assert descriptors() <= before
