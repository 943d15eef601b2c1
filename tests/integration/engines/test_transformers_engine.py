"""The Transformers engine as a process, over a real pool daemon's memory."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engineroom import Room, whole, wish
from tests.tinymodels import tiny
from worker.engines.messages import Attach, Check, Checked, Detach, Health, Sleep, Wake

PROMPT = tuple(range(40, 140))


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    await room.start_pool()
    yield room
    await room.close()


async def says(room: Room) -> tuple[int, ...]:
    reply = await room.holder.tell(Check(prompt=PROMPT, tokens=30))
    assert isinstance(reply, Checked), reply
    return reply.ids


async def test_two_weight_sets_take_turns_on_one_skeleton(room: Room, tmp_path: Path) -> None:
    sources = [tiny(tmp_path / "a", "llama", seed=1), tiny(tmp_path / "b", "llama", seed=2)]
    sets = [await room.stage(source) for source in sources]

    async def attach(weight_set: str) -> None:
        await room.holder.ok(Attach(pool_socket=str(room.pool_socket), weight_set=weight_set))
        await room.holder.ok(Wake(model="m"))

    async def detach() -> None:
        await room.holder.ok(Sleep())
        await room.holder.ok(Detach())

    fresh = []
    for source, weight_set in zip(sources, sets, strict=True):
        await room.start_engine("transformers", source)
        await attach(weight_set)
        fresh.append(await says(room))
        room.kill("engine")
        room.holder.hang_up()
    assert fresh[0] != fresh[1]

    await room.start_engine("transformers", sources[0])
    for turn in (0, 1, 0, 1, 1):
        await attach(sets[turn])
        assert await says(room) == fresh[turn]
        await detach()


async def test_asleep_it_has_given_its_memory_back(room: Room, tmp_path: Path) -> None:
    source = tiny(tmp_path / "a", "llama", max_position_embeddings=8192)
    weight_set = await room.stage(source)
    await room.start_engine("transformers", source, max_num_seqs=8)
    attach = Attach(pool_socket=str(room.pool_socket), weight_set=weight_set)
    assert (await room.holder.ok(attach)).bytes_mapped >= (source / "model.safetensors").stat().st_size * 0.8
    awake = await room.holder.ok(Wake(model="m"))
    assert (awake.awake, awake.bytes_kv) == (True, 2 * 2 * 8 * 8192 * 2 * 8 * 4)
    before = await says(room)
    long = await room.holder.tell(Check(prompt=tuple(n % 256 for n in range(6000)), tokens=1))
    assert isinstance(long, Checked)
    used = (await room.holder.ok(Health())).bytes_private
    asleep = await room.holder.ok(Sleep())
    assert not asleep.awake
    assert used - asleep.bytes_private >= 6000 * 2 * 2 * 2 * 8 * 4
    assert (await room.holder.ok(Detach())).bytes_mapped == 0
    await room.holder.ok(attach)
    await room.holder.ok(Wake(model="m"))
    assert await says(room) == before


async def test_c22_prompts_with_one_long_prefix_are_answered_the_same_in_every_cycle(room: Room, tmp_path: Path) -> None:
    source = tiny(tmp_path / "a", "llama")
    attach = Attach(pool_socket=str(room.pool_socket), weight_set=await room.stage(source))
    await room.start_engine("transformers", source)

    async def answers() -> list[tuple[int, ...]]:
        replies = [await room.holder.tell(Check(prompt=(*PROMPT, n, n + 1), tokens=8)) for n in range(4)]
        return [reply.ids for reply in replies if isinstance(reply, Checked)]

    known: list[tuple[int, ...]] = []
    for _ in range(10):
        await room.holder.ok(attach)
        await room.holder.ok(Wake(model="m"))
        known = known or await answers()
        assert await answers() == known
        await room.holder.ok(Sleep())
        await room.holder.ok(Detach())
    assert [len(ids) for ids in known] == [8] * 4


async def test_orders_out_of_order_are_refused_and_change_nothing(room: Room, tmp_path: Path) -> None:
    source, other = tiny(tmp_path / "a", "llama"), tiny(tmp_path / "b", "qwen3")
    weight_set, foreign = await room.stage(source), await room.stage(other)
    attach = Attach(pool_socket=str(room.pool_socket), weight_set=weight_set)
    await room.start_engine("transformers", source)
    assert (await room.holder.fault(Wake(model="m"))).code == "not_attached"
    layout = await room.holder.fault(Attach(pool_socket=str(room.pool_socket), weight_set=foreign))
    assert layout.code == "layout"
    assert "q_norm" in layout.message
    assert "unknown to the skeleton" in layout.message
    assert (await room.holder.fault(Attach(pool_socket=str(room.pool_socket), weight_set="ws_0"))).code == "unknown_set"
    assert (await room.holder.fault(Attach(pool_socket="/nowhere/pool.sock", weight_set=weight_set))).code == "pool"
    assert (await room.holder.fault(Check(prompt=PROMPT, tokens=1))).code == "not_awake"
    await room.holder.ok(attach)
    await room.holder.ok(attach)
    await room.holder.ok(Wake(model="m"))
    assert (await room.holder.fault(Detach())).code == "busy"
    assert len(await says(room)) == 30


async def test_engine_goes_on_after_the_pool_daemons_death(room: Room, tmp_path: Path) -> None:
    source = tiny(tmp_path / "a", "llama")
    weight_set = await room.stage(source)
    await room.start_engine("transformers", source)
    await room.holder.ok(Attach(pool_socket=str(room.pool_socket), weight_set=weight_set))
    await room.holder.ok(Wake(model="m"))
    before = await says(room)
    room.kill("pool")
    assert await says(room) == before
    await room.holder.ok(Sleep())
    await room.holder.ok(Detach())


async def test_chats_through_the_frontend(room: Room, tmp_path: Path) -> None:
    source = tiny(tmp_path / "a", "qwen3")
    weight_set = await room.stage(source)
    await room.start_engine("transformers", source)
    await room.start_frontend()
    await room.holder.ok(Attach(pool_socket=str(room.pool_socket), weight_set=weight_set))
    await room.holder.ok(Wake(model="m"))
    await room.serve(source, context_tokens=256)
    async with room.http.post("/generate", json=wish(temperature=0, max_tokens=40, ignore_eos=True)) as response:
        first = await whole(response)
    async with room.http.post("/generate", json=wish("req_2", temperature=0, max_tokens=40, ignore_eos=True)) as response:
        assert await whole(response) == first
    assert first[1]["completion_tokens"] == 40
