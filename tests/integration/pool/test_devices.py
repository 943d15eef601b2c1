"""Sets on GPUs: what engines bring, what they get back, and that memory goes with its last user. The GPU is a played one."""

import asyncio
import contextlib
import gc
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from pool import devices, handing
from pool.arena import Arena
from pool.client import PoolClient, PoolRefused
from pool.described import Described
from pool.devicelink import Spoiled, attach_device, deposit, exchange, find
from pool.gpu import Block
from pool.manifest import read as read_manifest
from pool.messages import Attached, Deposit, Tensor
from pool.nodes import Nodes
from pool.numa import MemoryNode, read_nodes
from pool.residency import Residency
from pool.server import Server
from pool.topology import Place, Topology
from tests.fakegpu import MIB, FakeGpu, read
from tests.poolroom import until, write_safetensors

SHARED, PAGE = 4 * MIB, 4096


class Room:
    """A server in this process, over a played GPU."""

    server: Server

    def __init__(self, path: Path, gpu: FakeGpu) -> None:
        self.path, self.gpu = path, gpu
        self.socket = path / "pool.sock"
        self.source = path / "source"
        self.source.mkdir()
        write_safetensors(self.source / "model.safetensors", {"x": np.arange(64, dtype=np.float32)})
        self.weights = np.random.default_rng(1).integers(0, 255, SHARED, np.uint8).tobytes()
        self.norm = bytes(range(200))

    def request(self, **changed: object) -> Deposit:
        tensors = (
            Tensor(name="norm", dtype="U8", shape=(200,), segment=2, offset=0, size_bytes=200),
            Tensor(name="up", dtype="U8", shape=(SHARED,), segment=0, offset=0, size_bytes=SHARED),
            Tensor(name="down", dtype="U8", shape=(MIB,), segment=1, offset=512, size_bytes=MIB),
        )
        fields = {"segments": (SHARED, 2 * MIB, PAGE), "host_segments": 1, "tensors": tensors, "form": "cfg_1", **changed}
        return Deposit(source=str(self.source), **fields)  # type: ignore[arg-type]

    def write(self, fds: list[int]) -> None:
        os.pwrite(fds[0], self.weights, 0)
        os.pwrite(fds[1], self.weights[:MIB], 512)
        os.pwrite(fds[2], self.norm, 0)

    async def deposit(self) -> str:
        return (await asyncio.to_thread(deposit, self.socket, self.request(), self.write)).weight_set

    async def attach(self, weight_set: str, device: str = "GPU-fake"):  # type: ignore[no-untyped-def]
        return await asyncio.to_thread(attach_device, self.socket, weight_set, device, lambda attached, fds: None)

    async def described(self) -> Described:
        async with await PoolClient.connect(self.socket) as client:
            return await client.describe()


@contextlib.asynccontextmanager
async def opened(path: Path, gpu: FakeGpu, ready_bytes: int = 0, nodes: Nodes | None = None) -> AsyncIterator[Room]:
    root = path / "segments"
    root.mkdir(mode=0o700, exist_ok=True)
    arena = Arena(root)
    arena.nodes = nodes or arena.nodes
    server = Server(arena, Residency(64 * MIB), [gpu], ready_bytes=ready_bytes)
    server.adopt()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        (path / "pool.sock").unlink(missing_ok=True)
        listener.bind(str(path / "pool.sock"))
        listener.listen(16)
        serving = asyncio.create_task(server.serve(listener))
        room = Room.__new__(Room) if (path / "source").exists() else Room(path, gpu)
        room.path, room.gpu, room.socket, room.server = path, gpu, path / "pool.sock", server
        try:
            yield room
        finally:
            serving.cancel()
            await server.close()
            arena.close()


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with opened(tmp_path, FakeGpu()) as found:
        yield found


async def test_an_engine_gets_back_what_it_brought(room: Room) -> None:
    weight_set = await room.deposit()
    attachment = await room.attach(weight_set)
    assert attachment.filled is not None
    assert attachment.filled.copied_bytes == SHARED + 2 * MIB
    assert read(attachment.fds[0], 0, SHARED) == room.weights
    assert read(attachment.fds[1], 0, 512 + MIB) == bytes(512) + room.weights[:MIB]
    assert os.pread(attachment.fds[2], 200, 0) == room.norm
    released = await asyncio.to_thread(attachment.release)
    assert released is not None
    assert released.freed_bytes == SHARED + 2 * MIB
    assert room.gpu.blocks == {}


async def test_the_same_files_in_the_same_form_are_found_and_are_one_set(room: Room) -> None:
    assert await asyncio.to_thread(find, room.socket, str(room.source), "cfg_1") is None
    weight_set = await room.deposit()
    assert await asyncio.to_thread(find, room.socket, str(room.source), "cfg_1") == weight_set
    assert await asyncio.to_thread(find, room.socket, str(room.source), "cfg_2") is None
    assert await room.deposit() == weight_set
    assert len((await room.described()).sets) == 1


async def test_two_engines_share_one_copy_and_the_last_one_frees_it(room: Room) -> None:
    weight_set = await room.deposit()
    first, second = await room.attach(weight_set), await room.attach(weight_set)
    assert (second.filled.copied_bytes, second.filled.path) == (0, "resident")
    assert len(room.gpu.blocks) == 2
    assert (await asyncio.to_thread(first.release)).freed_bytes == 0
    assert (await asyncio.to_thread(second.release)).freed_bytes == SHARED + 2 * MIB


async def test_descriptors_come_while_the_bytes_still_travel(room: Room) -> None:
    weight_set = await room.deposit()
    room.gpu.gate.clear()
    mapped: list[int] = []

    def map_them(attached: Attached, fds: list[int]) -> None:
        mapped.append(len(fds))
        room.gpu.gate.set()

    attachment = await asyncio.to_thread(attach_device, room.socket, weight_set, "GPU-fake", map_them)
    assert mapped == [3]
    assert read(attachment.fds[0], 0, SHARED) == room.weights
    await asyncio.to_thread(attachment.release)


async def test_a_device_without_room_is_seen_before_a_byte_moves(room: Room) -> None:
    weight_set = await room.deposit()
    room.gpu.foreign_bytes = room.gpu.total_bytes - 65 * MIB
    with pytest.raises(PoolRefused) as refused:
        await room.attach(weight_set)
    assert (refused.value.code, refused.value.need_bytes, refused.value.free_bytes) == ("device_full", 6 * MIB, MIB)
    assert room.gpu.copies == []
    room.gpu.foreign_bytes = 0
    await asyncio.to_thread((await room.attach(weight_set)).release)


async def test_memory_that_somebody_takes_meanwhile_leaves_nothing_half_there(room: Room) -> None:
    """C16, as the pool sees it."""
    weight_set = await room.deposit()
    room.gpu.steals_after = 1
    with pytest.raises(PoolRefused, match="device_full"):
        await room.attach(weight_set)
    assert room.gpu.blocks == {}
    state = (await room.described()).devices[0]
    assert state.sets.get(weight_set, 0) == 0


def descriptors_of_blocks() -> int:
    gc.collect()
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(entry).startswith("/memfd:block")
    return found


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_copy_that_fails_leaves_no_descriptor_of_its_memory(room: Room, in_place: bool) -> None:
    others = descriptors_of_blocks()  # other tests' of this process
    first, second = await two_sets(room)
    old = await room.attach(first) if in_place else None
    room.gpu.failing = True
    with pytest.raises((PoolRefused, OSError)):
        await (asyncio.to_thread(exchange, old, second) if old is not None else room.attach(second))
    await until(lambda: not room.gpu.blocks)
    if old is not None:
        old.close_fds()
    await until(lambda: descriptors_of_blocks() <= others)
    room.gpu.failing = False
    await asyncio.to_thread((await room.attach(second)).release)


async def test_two_hundred_wakes_and_switches_leave_nothing_behind(room: Room) -> None:
    first, second = await two_sets(room)

    async def wake_and_switch() -> tuple[int, int, int]:
        old = await room.attach(first)
        old.close_fds()  # as an engine that has mapped them
        new = await asyncio.to_thread(exchange, old, second)
        new.close_fds()
        await asyncio.to_thread(new.release)
        await until(lambda: not room.gpu.blocks)
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(room.gpu.blocks)

    for _ in range(20):  # threads of the loop's own are made as they are needed
        begun = await wake_and_switch()
    for _ in range(200):
        ended = await wake_and_switch()
    gc.collect()
    assert ended[2] == 0
    assert ended[0] <= begun[0] + 5 and ended[1] <= begun[1] + 5, f"descriptors, threads, blocks: {begun} -> {ended}"


async def test_an_engine_that_dies_gives_its_memory_back(room: Room) -> None:
    weight_set = await room.deposit()
    attachment = await room.attach(weight_set)
    assert len(room.gpu.blocks) == 2
    await asyncio.to_thread(attachment.close)  # the connection is gone without a word
    await until(lambda: not room.gpu.blocks)


async def test_a_device_that_gives_nothing_back_keeps_no_set_on_the_host(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_set = await room.deposit()
    attachment = await room.attach(weight_set)
    destroy = room.gpu.destroy

    def lost(block: Block) -> None:
        destroy(block)
        raise OSError(719, "cuMemUnmap: the context is lost")

    monkeypatch.setattr(room.gpu, "destroy", lost)
    await asyncio.to_thread(attachment.close)
    await until(lambda: not room.gpu.blocks)
    async with await PoolClient.connect(room.socket) as client:
        async with asyncio.timeout(20):
            while (await client.describe()).sets[0].mapped_by:
                pass
        assert (await client.drop(weight_set)).sets == ()


async def test_an_engine_that_dies_while_bytes_travel_leaves_the_device_as_it_was(room: Room) -> None:
    weight_set = await room.deposit()
    room.gpu.gate.clear()

    def dies(attached: Attached, fds: list[int]) -> None:
        raise RuntimeError("killed in the middle")

    with pytest.raises(RuntimeError):
        await asyncio.to_thread(attach_device, room.socket, weight_set, "GPU-fake", dies)
    room.gpu.gate.set()
    await until(lambda: not room.gpu.blocks)
    await asyncio.to_thread((await room.attach(weight_set)).release)


async def test_a_device_whose_driver_hangs_is_named_and_gives_back_what_it_was_to_have_once_it_goes_on(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_set = await room.deposit()
    room.gpu.gate.clear()
    with monkeypatch.context() as impatient:  # for as long as nothing can come; a busy machine needs longer for what does
        impatient.setattr(handing, "SILENT_S", 0.2)
        impatient.setattr(devices, "DESCRIBE_S", 0.2)
        for ask in (lambda: room.attach(weight_set), room.described):
            with pytest.raises(PoolRefused, match=r"GPU-fake has not answered for 0\.2 s") as refused:
                await ask()
            assert refused.value.code == "device_silent"
    room.gpu.gate.set()
    await until(lambda: not room.gpu.blocks)
    assert (await room.described()).devices[0].sets == {}
    await asyncio.to_thread((await room.attach(weight_set)).release)


async def test_who_asks_for_a_set_on_its_way_waits_for_the_same_copy(room: Room) -> None:
    weight_set = await room.deposit()
    room.gpu.gate.clear()
    asked = [asyncio.create_task(room.attach(weight_set)) for _ in range(2)]
    await until(lambda: len(room.gpu.blocks) == 2)
    room.gpu.gate.set()
    first, second = await asyncio.gather(*asked)
    assert sorted([first.filled.copied_bytes, second.filled.copied_bytes]) == [0, SHARED + 2 * MIB]
    assert room.gpu.copies == [SHARED, 2 * MIB]
    for one in (first, second):
        await asyncio.to_thread(one.release)


async def test_a_set_on_a_device_is_not_dropped(room: Room) -> None:
    weight_set = await room.deposit()
    attachment = await room.attach(weight_set)
    async with await PoolClient.connect(room.socket) as client:
        with pytest.raises(PoolRefused, match="in_use"):
            await client.drop(weight_set)
    await asyncio.to_thread(attachment.release)
    async with await PoolClient.connect(room.socket) as client:
        await client.drop(weight_set)


async def test_a_device_that_is_not_here_is_refused_by_name(room: Room) -> None:
    weight_set = await room.deposit()
    with pytest.raises(PoolRefused, match="GPU-fake") as refused:
        await room.attach(weight_set, "GPU-other")
    assert refused.value.code == "unknown_device"


async def test_sets_are_pinned_ahead_of_need_and_unpinned_when_they_leave(room: Room) -> None:
    weight_set = await room.deposit()
    await until(lambda: sum(room.gpu.registered.values()) == SHARED + 2 * MIB)
    async with await PoolClient.connect(room.socket) as client:
        await client.drop(weight_set)
    assert room.gpu.registered == {}


async def test_n24_a_wake_pins_nothing_of_what_was_pinned_ahead(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of N24, its time at the shape of a 30B model, is measured on a GPU (`tests/bench`)."""
    weight_set = await room.deposit()
    await until(lambda: sum(room.gpu.registered.values()) == SHARED + 2 * MIB)
    late: list[int] = []
    monkeypatch.setattr(room.gpu, "register", lambda address, size: late.append(size))
    for _ in range(3):
        attachment = await room.attach(weight_set)
        assert read(attachment.fds[0], 0, SHARED) == room.weights
        await asyncio.to_thread(attachment.release)
        await until(lambda: room.gpu.blocks == {})
    assert late == []
    assert sum(room.gpu.copies) == 3 * (SHARED + 2 * MIB)


async def test_memory_that_cannot_be_pinned_costs_speed_only(tmp_path: Path) -> None:
    async with opened(tmp_path, FakeGpu(pinnable=False)) as room:
        attachment = await room.attach(await room.deposit())
        assert read(attachment.fds[0], 0, SHARED) == room.weights
        await asyncio.to_thread(attachment.release)


async def test_the_next_daemon_adopts_and_pins_what_was_brought(tmp_path: Path) -> None:
    async with opened(tmp_path, FakeGpu()) as room:
        weight_set, weights = await room.deposit(), room.weights
    gpu = FakeGpu()
    async with opened(tmp_path, gpu) as room:
        await until(lambda: sum(gpu.registered.values()) == SHARED + 2 * MIB)
        attachment = await room.attach(weight_set)
        assert read(attachment.fds[0], 0, SHARED) == weights
        await asyncio.to_thread(attachment.release)


async def test_a_deposit_that_is_not_sealed_leaves_nothing(room: Room) -> None:
    def dies(fds: list[int]) -> None:
        raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError):
        await asyncio.to_thread(deposit, room.socket, room.request(), dies)
    await until(lambda: list((room.path / "segments").iterdir()) == [])
    assert (await room.described()).used_bytes == 0


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(name="t", dtype="U8", shape=(9,), segment=0, offset=SHARED, size_bytes=9),
        Tensor(name="t", dtype="U8", shape=(9,), segment=7, offset=0, size_bytes=9),
        Tensor(name="t", dtype="U8", shape=(9,), segment=0, offset=-9, size_bytes=9),
    ],
)
async def test_a_tensor_outside_its_segment_is_refused(room: Room, tensor: Tensor) -> None:
    with pytest.raises(PoolRefused) as refused:
        await asyncio.to_thread(deposit, room.socket, room.request(tensors=(tensor,)), room.write)
    assert refused.value.code == "bad_layout"


async def test_memory_lies_pinned_for_the_next_set_of_a_configuration(tmp_path: Path) -> None:
    gpu = FakeGpu()
    size = SHARED + 2 * MIB
    async with opened(tmp_path, gpu, ready_bytes=2 * size) as room:
        first = await room.deposit()
        await until(lambda: sum(gpu.registered.values()) == 2 * size + PAGE)  # the set, and as much again
        pinned = dict(gpu.registered)
        room.weights = room.weights[::-1]
        second = await room.deposit()
        assert second != first
        attachment = await room.attach(second)
        assert read(attachment.fds[0], 0, SHARED) == room.weights
        assert read(attachment.fds[1], 0, 512 + MIB) == bytes(512) + room.weights[:MIB]
        assert pinned.items() <= gpu.registered.items(), "nothing was pinned for it"
        await asyncio.to_thread(attachment.release)


async def test_what_a_set_leaves_stays_pinned_and_is_zeroed_between_the_next_ones_tensors(tmp_path: Path) -> None:
    gpu = FakeGpu()
    async with opened(tmp_path, gpu, ready_bytes=16 * MIB) as room:
        first = await room.deposit()
        await until(lambda: sum(gpu.registered.values()) == 2 * (SHARED + 2 * MIB) + PAGE)
        async with await PoolClient.connect(room.socket) as client:
            await client.drop(first)
            assert (await client.describe()).ready_bytes >= SHARED + 2 * MIB
        before = dict(gpu.registered)
        room.weights = room.weights[::-1]
        attachment = await room.attach(await room.deposit())
        assert set(gpu.registered) == set(before)
        assert read(attachment.fds[1], 0, 2 * MIB) == bytes(512) + room.weights[:MIB] + bytes(MIB - 512)
        await asyncio.to_thread(attachment.release)


async def test_a_deposit_that_comes_to_nothing_gives_its_memory_back_ready(tmp_path: Path) -> None:
    gpu = FakeGpu()
    async with opened(tmp_path, gpu, ready_bytes=16 * MIB) as room:
        await room.deposit()
        await until(lambda: sum(gpu.registered.values()) == 2 * (SHARED + 2 * MIB) + PAGE)
        pinned = dict(gpu.registered)
        ready = (await room.described()).ready_bytes

        def dies(fds: list[int]) -> None:
            raise RuntimeError("the engine died")

        with pytest.raises(RuntimeError):
            await asyncio.to_thread(deposit, room.socket, room.request(), dies)
        await until(lambda: not list((room.path / "segments").glob("draft-*")))
        assert (await room.described()).ready_bytes == ready
        assert gpu.registered == pinned


async def test_what_a_dead_daemon_left_on_a_device_is_counted_for_as_long_as_an_engine_maps_it(tmp_path: Path) -> None:
    async with opened(tmp_path, FakeGpu()) as room:
        attachment = await room.attach(await room.deposit())
    async with opened(tmp_path, FakeGpu()) as room:

        async def left() -> int:
            return (await room.described()).devices[0].left_bytes

        async with asyncio.timeout(20):
            while await left() != SHARED + 2 * MIB:
                await asyncio.sleep(0.01)
            assert (await room.described()).devices[0].resident_bytes == 0, "it is handed out to nobody"
            await asyncio.to_thread(attachment.close)
            while await left():
                await asyncio.sleep(0.01)


async def test_a_set_that_two_dead_daemons_left_is_counted_for_each_copy_and_a_shared_copy_once(tmp_path: Path) -> None:
    whole = SHARED + 2 * MIB
    async with opened(tmp_path, FakeGpu()) as room:
        weight_set = await room.deposit()
        first = await room.attach(weight_set)
    async with opened(tmp_path, FakeGpu()) as room:
        await until_left(room, whole)
        second, third = await room.attach(weight_set), await room.attach(weight_set)
        assert second.attached.copies == third.attached.copies != first.attached.copies
    async with opened(tmp_path, FakeGpu()) as room:
        await until_left(room, 2 * whole, engines=3)
        await asyncio.to_thread(second.close)
        await until_left(room, 2 * whole, engines=2)  # the third has that copy still
        await asyncio.to_thread(third.close)
        await until_left(room, whole)
        await asyncio.to_thread(first.close)
        await until_left(room, 0)


async def until_left(room: Room, size: int, *, engines: int | None = None) -> None:
    """`engines`: that hold the set, all together."""
    async with asyncio.timeout(20):
        while True:
            described = await room.described()
            held = sum(one.mapped_by for one in described.sets)
            if described.devices[0].left_bytes == size and engines in (None, held):
                return
            await asyncio.sleep(0.01)


# ---- one set in another's place --------------------------------------------------------------------------------


async def two_sets(room: Room) -> tuple[str, str]:
    first = await room.deposit()
    room.weights = room.weights[::-1]
    return first, await room.deposit()


async def test_a_switch_takes_place_in_memory_that_is_mapped(room: Room) -> None:
    first, second = await two_sets(room)
    old = await room.attach(first)
    blocks = set(room.gpu.blocks)
    new = await asyncio.to_thread(exchange, old, second)
    assert new.filled is not None
    assert new.filled.copied_bytes == SHARED + 2 * MIB
    assert (new.attached.in_place, len(new.fds)) == (True, 1)
    assert os.pread(new.fds[0], 200, 0) == room.norm
    assert set(room.gpu.blocks) == blocks, "nothing was made, nothing freed"
    assert read(old.fds[0], 0, SHARED) == room.weights, "the descriptors of before show the new bytes"
    described = await room.described()
    assert described.devices[0].sets == {second: 1}
    assert {one.weight_set: one.mapped_by for one in described.sets} == {first: 0, second: 1}
    back = await asyncio.to_thread(exchange, new, first)
    assert read(old.fds[0], 0, SHARED) == room.weights[::-1]
    released = await asyncio.to_thread(back.release)
    assert released is not None
    assert released.freed_bytes == SHARED + 2 * MIB
    assert room.gpu.blocks == {}


async def test_memory_that_others_have_is_not_taken_from_them(room: Room) -> None:
    first, second = await two_sets(room)
    old, neighbour = await room.attach(first), await room.attach(first)
    with pytest.raises(PoolRefused, match="not_in_place"):
        await asyncio.to_thread(exchange, old, second)
    assert (await room.described()).devices[0].sets == {first: 2}
    assert {one.weight_set: one.mapped_by for one in (await room.described()).sets} == {first: 2, second: 0}
    assert (await asyncio.to_thread(old.release)).freed_bytes == 0
    assert (await asyncio.to_thread(neighbour.release)).freed_bytes == SHARED + 2 * MIB


async def test_a_set_that_is_there_already_is_shared_rather_than_brought_again(room: Room) -> None:
    first, second = await two_sets(room)
    old, neighbour = await room.attach(first), await room.attach(second)
    with pytest.raises(PoolRefused, match="not_in_place"):
        await asyncio.to_thread(exchange, old, second)
    for one in (old, neighbour):
        await asyncio.to_thread(one.release)


async def test_another_layout_takes_nobodys_place(room: Room) -> None:
    first = await room.deposit()
    other = room.request(form="cfg_2", tensors=room.request().tensors[:2])
    second = (await asyncio.to_thread(deposit, room.socket, other, room.write)).weight_set
    old = await room.attach(first)
    with pytest.raises(PoolRefused, match="not_in_place"):
        await asyncio.to_thread(exchange, old, second)
    await asyncio.to_thread(old.release)


async def test_a_copy_that_fails_in_place_leaves_the_device_empty_and_says_so(room: Room) -> None:
    first, second = await two_sets(room)
    old = await room.attach(first)
    room.gpu.failing = True
    with pytest.raises(Spoiled):
        await asyncio.to_thread(exchange, old, second)
    room.gpu.failing = False
    await until(lambda: not room.gpu.blocks)
    again = await room.attach(second)
    assert read(again.fds[0], 0, SHARED) == room.weights
    await asyncio.to_thread(again.release)


async def test_digests_begin_while_the_rest_is_written(room: Room) -> None:
    told = await room.deposit()

    def write(fds: list[int]):  # type: ignore[no-untyped-def]
        os.pwrite(fds[2], room.norm, 0)
        yield 1
        room.write(fds)
        yield 2
        yield 1

    async with await PoolClient.connect(room.socket) as client:
        await client.drop(told)
        again = await asyncio.to_thread(deposit, room.socket, room.request(), write)
        assert again.weight_set == told
        assert (await client.verify(told)).bad == ()


async def test_a_deposit_lies_on_its_gpus_memory_node_and_the_pool_says_so() -> None:
    here = read_nodes()
    if not here:
        pytest.skip("this kernel tells of no memory nodes")
    other = MemoryNode(number=here[0].number + 1, total_bytes=1 << 40, free_bytes=1 << 40)  # nothing shall go there: it is not
    near = Topology(places=(Place(device="GPU-fake", uplink="0000:01:00.0", node=here[0].number),))
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a policy belongs to shared memory's files, not to a disk's
    try:
        async with opened(path, FakeGpu(), nodes=Nodes(near, read=lambda: (here[0], other))) as room:
            weight_set = (await asyncio.to_thread(deposit, room.socket, room.request(device="GPU-fake"), room.write)).weight_set
            described = await room.described()
            if described.placement != "placed":
                pytest.skip(described.placement)
            (found,) = described.sets
            assert found.node_bytes == {here[0].number: SHARED + 2 * MIB + PAGE}
            assert [node.number for node in described.nodes] == [here[0].number, other.number]
            kept = read_manifest(path / "segments" / weight_set)
            assert kept is not None
            assert kept.nodes == (here[0].number,) * 3, "and the next daemon knows it"
    finally:
        shutil.rmtree(path)
