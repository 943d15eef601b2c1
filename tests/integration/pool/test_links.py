"""A set over several links, through a real daemon that sees two played CUDA devices; and deaths in the middle of a copy."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pool.blocks import Groups
from pool.client import PoolEnds, PoolRefused
from pool.described import Described
from pool.devicelink import DeviceAttachment, attach_device, deposit
from pool.messages import Deposit, Tensor
from tests.poolroom import DEADLINE_S, MIB, Daemon, remove, until, wait_for, write_safetensors

FAKE_CUDA = Path(__file__).parents[2] / "fakecuda"
FIRST, SECOND = (f"GPU-{two * 4}-{two * 2}-{two * 2}-{two * 2}-{two * 6}" for two in ("00", "01"))
SIZES = (2 * MIB, 128 * MIB, 126 * MIB)
DEATH_S = 15.0
"""Resources are back within it: a second, or as long as a busy machine makes of it."""


class House:
    """A set of 256 MiB, and the daemon that has it."""

    def __init__(self, path: Path, directory: Path) -> None:
        source = path / "source"
        source.mkdir()
        write_safetensors(source / "model.safetensors", {"x": np.arange(64, dtype=np.float32)})
        self.daemon = Daemon(directory, budget=1024 * MIB, extra=("--gpus",))
        page = np.random.default_rng(5).integers(0, 255, MIB, np.uint8)
        self.bytes = [np.concatenate([page + number for number in range(size // MIB)]) for size in SIZES]
        tensors = tuple(
            Tensor(name=f"t{number}", dtype="U8", shape=(size,), segment=number, offset=0, size_bytes=size)
            for number, size in enumerate(SIZES)
        )
        self.request = Deposit(source=str(source), form="cfg", segments=SIZES, host_segments=0, tensors=tensors)
        self.daemon.start()
        self.weight_set = self.deposit()

    def deposit(self) -> str:
        return deposit(self.daemon.socket, self.request, self.write).weight_set

    def write(self, fds: list[int]) -> None:
        for fd, data in zip(fds, self.bytes, strict=True):
            os.pwrite(fd, data.data, 0)

    def attach(self, device: str = FIRST, *, beside: tuple[str, ...] = (), neighbours: Groups = ()) -> DeviceAttachment:
        return attach_device(
            self.daemon.socket, self.weight_set, device, lambda attached, fds: None, beside=beside, neighbours=neighbours
        )

    def arrived(self, attachment: DeviceAttachment) -> bool:
        read = [np.fromfile(f"/proc/self/fd/{fd}", np.uint8) for fd in attachment.fds]
        return all(np.array_equal(mine, theirs) for mine, theirs in zip(self.bytes, read, strict=True))

    async def described(self) -> Described:
        async with self.daemon.client() as client:
            return await client.describe()


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While it is there, copies stand still at so many bytes."""
    return tmp_path / "hold"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, hold: Path) -> Callable[..., None]:
    def set_up(**more: str) -> None:
        told = {"FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_BYTES": str(576 * MIB), "PYTHONPATH": str(FAKE_CUDA), **more}
        told["FAKE_CUDA_HOLD"] = str(hold)
        for name, value in told.items():
            monkeypatch.setenv(name, value)

    set_up()
    return set_up


@pytest.fixture
def build(tmp_path: Path, directory: Path, machine: Callable[..., None]) -> Iterator[Callable[..., House]]:
    """A house whose daemon is told more of its machine."""
    built: list[House] = []

    def found(**more: str) -> House:
        machine(**more)
        built.append(House(tmp_path, directory))
        return built[-1]

    yield found
    for house in built:
        if house.daemon.process is not None and house.daemon.process.poll() is None:
            assert house.daemon.stop() == 0
        assert "Traceback" not in house.daemon.log.read_text()


@pytest.fixture
def house(build: Callable[..., House]) -> House:
    return build()


def test_about_half_goes_through_the_neighbour_and_every_byte_arrives(build: Callable[..., House]) -> None:
    """Not quite half: a link that is done takes over what the other, whose ring had to be made first, has not begun."""
    house = build(FAKE_CUDA_BYTES_PER_S="5e8")
    attachment = house.attach()
    assert attachment.filled is not None
    assert attachment.filled.path == "links"
    own, other = attachment.filled.shards
    assert (own.via, other.via) == (FIRST, SECOND)
    assert own.copied_bytes + other.copied_bytes == sum(SIZES)
    assert own.copied_bytes >= sum(SIZES) // 2 - 34 * MIB
    assert other.copied_bytes >= 32 * MIB
    assert house.arrived(attachment)
    assert attachment.release() is not None


def test_without_peers_it_goes_by_its_own_link(build: Callable[..., House]) -> None:
    house = build(FAKE_CUDA_NO_PEERS="1")
    attachment = house.attach(SECOND)
    assert attachment.filled is not None
    assert (attachment.filled.path, [shard.via for shard in attachment.filled.shards]) == ("host", [SECOND])
    assert house.arrived(attachment)
    attachment.release()


# ---- deaths in the middle -----------------------------------------------------------------------------------


def _engine(socket: Path, weight_set: str, here: str) -> None:
    """Attaches, and says so once the descriptors are there and bytes still travel."""
    attach_device(socket, weight_set, FIRST, lambda attached, fds: Path(here).touch())
    Path(here + "-filled").touch()
    time.sleep(60)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[House], multiprocessing.Process]]:
    begun: list[multiprocessing.Process] = []

    def begin(house: House) -> multiprocessing.Process:
        mapped = tmp_path / "mapped"
        mapped.unlink(missing_ok=True)
        process = multiprocessing.get_context("spawn").Process(
            target=_engine, args=(house.daemon.socket, house.weight_set, str(mapped))
        )
        process.start()
        begun.append(process)
        wait_for(mapped.exists)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.join(DEADLINE_S)
        process.close()


def test_what_a_gangs_rank_needs_for_itself_goes_over_no_link_of_the_others(build: Callable[..., House]) -> None:
    house = build(FAKE_CUDA_BYTES=str(1024 * MIB))
    first = house.attach(neighbours=((0, 1, 2),))
    rank = house.attach(neighbours=((2, 1, 0),), beside=(SECOND,))
    assert rank.filled is not None
    assert (rank.filled.copied_bytes, rank.filled.path) == (sum(SIZES), "host")
    for one in (first, rank):
        one.release()


async def test_an_engine_killed_in_the_middle_of_its_wake_leaves_the_device_empty(  # type: ignore[no-untyped-def]
    tmp_path: Path, hold: Path, house: House, engine
) -> None:
    hold.write_text(str(64 * MIB))
    process = engine(house)
    os.kill(process.pid, signal.SIGKILL)
    process.join(DEADLINE_S)
    hold.unlink()
    died = time.monotonic()
    while True:
        state = (await house.described()).devices[0]
        if not state.sets and state.free_bytes == state.total_bytes:
            break
        assert time.monotonic() - died < DEATH_S
    assert not (tmp_path / "mapped-filled").exists()
    attachment = house.attach()
    assert house.arrived(attachment)
    attachment.release()


async def test_a_daemon_killed_in_the_middle_of_a_copy_is_followed_by_one_that_has_the_set(  # type: ignore[no-untyped-def]
    hold: Path, house: House, engine
) -> None:
    hold.write_text(str(64 * MIB))
    process = engine(house)
    house.daemon.kill()
    before = len(house.daemon.events("registered"))
    process.join(DEADLINE_S)
    assert process.exitcode == 1, "who waits for `Filled` hears that the daemon has gone, and does not use what it mapped"
    hold.unlink()
    house.daemon.start()
    wait_for(lambda: len(house.daemon.events("registered")) > before)
    state = (await house.described()).devices[0]
    assert (state.registered_bytes, state.free_bytes) == (sum(SIZES), state.total_bytes)
    attachment = house.attach()
    assert house.arrived(attachment)
    attachment.release()


async def test_a_set_on_its_way_arrives_although_the_daemons_directory_was_removed(hold: Path, house: House) -> None:
    hold.write_text(str(64 * MIB))
    mapped = threading.Event()
    attaching = asyncio.create_task(
        asyncio.to_thread(attach_device, house.daemon.socket, house.weight_set, FIRST, lambda attached, fds: mapped.set())
    )
    async with house.daemon.client() as client:
        await until(mapped.is_set)
        await asyncio.to_thread(remove, house.daemon.root)
        with pytest.raises(PoolEnds):
            await client.describe()
    hold.unlink()
    attachment = await attaching
    assert house.arrived(attachment)
    assert house.daemon.process is not None
    assert await asyncio.to_thread(house.daemon.process.wait, DEADLINE_S) == 3
    house.daemon.start()
    assert house.deposit() == house.weight_set
    again = await asyncio.to_thread(house.attach)
    assert house.arrived(again) and house.arrived(attachment)
    again.release()
    attachment.release()


# ---- twice, and bad bytes -----------------------------------------------------------------------------------


def test_giving_back_twice_is_refused_and_harmless(house: House) -> None:
    first, second = house.attach(), house.attach()
    assert first.release() is not None
    assert house.arrived(second)
    assert second.release() is not None
    assert second.release() is None


async def test_a_flipped_bit_is_found_and_a_sound_copy_takes_its_place_on_the_device_too(house: House) -> None:
    holder = house.attach()
    segment = house.daemon.root / house.weight_set / "00001.segment"
    os.chmod(segment, 0o600)
    with segment.open("r+b") as file:
        file.seek(77)
        file.write(bytes([house.bytes[1][77] ^ 1]))
    async with house.daemon.client() as client:
        assert (await client.verify(house.weight_set)).bad == ("t1",)
    with pytest.raises(PoolRefused) as refused:
        house.attach()
    assert refused.value.code == "corrupt"
    assert house.deposit() == house.weight_set
    attachment = house.attach()
    assert attachment.filled is not None
    assert attachment.filled.copied_bytes == sum(SIZES), "not the memory of those who still have the old copy"
    assert house.arrived(attachment)
    holder.release()
    assert house.arrived(attachment)
    attachment.release()
    state = (await house.described()).devices[0]
    assert state.free_bytes == state.total_bytes
