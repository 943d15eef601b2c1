"""The engine's process with the fake engine: its two wires, its orders, its end."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engineroom import DEADLINE_S, Room
from worker.engines.messages import (
    Abort,
    Ack,
    Attach,
    Check,
    Checked,
    Connected,
    Detach,
    Drain,
    Ended,
    EngineToFrontend,
    Fault,
    Health,
    Sampling,
    Shutdown,
    Sleep,
    State,
    Submit,
    Tokens,
    Wake,
)
from worker.engines.wire import decoder, read, write
from worker.sources.fakes import fake_source

GREEDY = Sampling(max_tokens=1000, temperature=0, stop_ids=(256,))


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    await room.start_pool()
    yield room
    await room.close()


class Side:
    """The frontend's end of the token wire, played."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._path = room.directory / "tokens.sock"
        self._streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    async def listen(self) -> None:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._room.writers.append(writer)
            await self._streams.put((reader, writer))

        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(accept, str(self._path))
        self._room.servers.append(self._server)

    async def greeted(self) -> Connected:
        async with asyncio.timeout(DEADLINE_S):
            self.reader, self.writer = await self._streams.get()
        first = await self.hear()
        assert isinstance(first, Connected)
        return first

    async def hear(self) -> Connected | Tokens | Ended:
        async with asyncio.timeout(DEADLINE_S):
            message: Connected | Tokens | Ended | None = await read(self.reader, decoder(EngineToFrontend))
        assert message is not None
        return message

    async def say(self, message: Submit | Abort | Ack) -> None:
        await write(self.writer, message)

    async def output(self, request: str, count: int) -> list[int]:
        """Ids of `request` from the first one heard on, until there are `count` or the end."""
        ids: list[int] = []
        while len(ids) < count:
            message = await self.hear()
            if isinstance(message, Ended) and message.request == request:
                break
            ids += ids_of(message, request)
        return ids

    async def leave(self) -> None:
        self.writer.close()
        self._server.close()


def ids_of(message: Connected | Tokens | Ended, request: str) -> list[int]:
    if not isinstance(message, Tokens):
        return []
    return [token for name, ids in zip(message.requests, message.ids, strict=True) if name == request for token in ids]


async def up(room: Room, name: str = "m", **arguments: object) -> Attach:
    source = fake_source(room.data, name, 4096)
    attach = Attach(pool_socket=str(room.pool_socket), weight_set=await room.stage(source))
    await room.start_engine("fake", source, **arguments)
    await room.holder.ok(attach)
    await room.holder.ok(Wake(model=name))
    return attach


async def test_what_a_frontend_has_not_recorded_comes_again(room: Room) -> None:
    side = Side(room)
    await side.listen()
    await up(room, tokens_per_s=200)
    assert (await side.greeted()).requests == {}
    await side.say(Submit(request="r1", prompt=tuple(b"some words"), sampling=GREEDY))
    await side.say(Submit(request="r2", prompt=(), sampling=GREEDY))
    had = await side.output("r1", 6)
    await side.say(Ack(request="r1", count=4))
    await side.output("r1", 2)
    await side.leave()
    await side.listen()
    again = await side.greeted()
    assert again.requests["r1"] == 4
    await side.say(Submit(request="r1", prompt=tuple(b"some words"), sampling=GREEDY))  # sent twice, run once
    rest = await side.output("r1", 10**9)
    assert bytes(had[:4] + rest) == b"You said: some words"
    for request, count in (("r1", 20), ("r2", 10)):
        await side.say(Ack(request=request, count=count, ended=True))
    await side.leave()
    await side.listen()
    assert (await side.greeted()).requests == {}


async def test_abort_and_unknown_abort_are_answered(room: Room) -> None:
    side = Side(room)
    await side.listen()
    await up(room, tokens_per_s=100, ignore_stop=True)
    await side.greeted()
    await side.say(Submit(request="r1", prompt=(65,), sampling=GREEDY))
    ids = await side.output("r1", 3)
    await side.say(Abort(request="r1"))
    while not isinstance(ended := await side.hear(), Ended):
        ids += ids_of(ended, "r1")
    assert (ended.reason, ended.count) == ("aborted", len(ids))
    await side.say(Abort(request="never"))
    assert await side.hear() == Ended(request="never", reason="aborted", count=0)
    await side.say(Submit(request="long", prompt=(65,) * 5000, sampling=GREEDY))
    failed = await side.hear()
    assert isinstance(failed, Ended)
    assert (failed.reason, failed.message) == ("failed", "too_long: a prompt of 5000 tokens in a context of 4096")


async def test_orders_and_refusals(room: Room) -> None:
    side = Side(room)
    await side.listen()
    attach = await up(room, tokens_per_s=30, skeleton_bytes=1000, kv_bytes=500, wake_ms=30, keep_fraction=0.5)
    await side.greeted()
    awake = await room.holder.ok(Health())
    assert (awake.awake, awake.bytes_kv, awake.bytes_private) == (True, 500, 1500)
    assert awake.attached == attach.weight_set
    assert awake.bytes_mapped >= 4096
    await side.say(Submit(request="r", prompt=tuple(b"x" * 80), sampling=GREEDY))  # three seconds
    await side.output("r", 1)
    assert (await room.holder.fault(Sleep())).code == "busy"
    drain = await room.holder.fault(Drain(deadline_ms=20))
    assert (drain.code, drain.message) == ("drain_timeout", "1 requests still run after 20 ms")
    drained = await room.holder.ok(Drain(deadline_ms=30_000))
    assert (drained.running, drained.took_ms > 50) == (0, True)
    assert await room.holder.tell(Check(prompt=(65, 66), tokens=4)) == Checked(ids=tuple(b"You "))
    assert (await room.holder.ok(Sleep())).bytes_kv == 250
    await room.holder.ok(Detach())
    assert (await room.holder.fault(Wake(model="m"))).code == "not_attached"
    await room.holder.ok(attach)
    assert (await room.holder.ok(Wake(model="m"))).took_ms >= 30


async def test_told_failures_happen_as_often_as_told_over_all_processes(room: Room) -> None:
    source = fake_source(room.data, "m", 4096)
    for status in (1, 1, None):
        await room.start_engine("fake", source, fail="start:2")
        if status is not None:
            assert await asyncio.to_thread(room.processes["engine"].wait, DEADLINE_S) == status
    assert isinstance(await room.holder.tell(Health()), State)
    room.kill("engine")
    room.holder.hang_up()
    await up(room, "w")
    room.kill("engine")
    room.holder.hang_up()
    source = fake_source(room.data, "w", 4096)
    await room.start_engine("fake", source, fail="wake:1")
    await room.holder.ok(Attach(pool_socket=str(room.pool_socket), weight_set=await room.stage(source)))
    assert isinstance(await room.holder.tell(Wake(model="w")), Fault)
    await room.holder.ok(Wake(model="w"))


async def test_another_engines_weights_are_refused(room: Room, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(_one_tensor())
    weight_set = await room.stage(foreign)
    await room.start_engine("fake", fake_source(room.data, "m", 4096))
    fault = await room.holder.fault(Attach(pool_socket=str(room.pool_socket), weight_set=weight_set))
    assert fault.code == "layout"
    assert (await room.holder.ok(Health())).attached is None


async def test_weights_that_change_under_it_end_it(room: Room) -> None:
    side = Side(room)
    await side.listen()
    await up(room)
    await side.greeted()
    maps = Path(f"/proc/{room.processes['engine'].pid}/maps").read_text().splitlines()
    [segment] = {Path(line.split(maxsplit=5)[5]) for line in maps if line.endswith(".segment")}
    segment.chmod(0o600)
    segment.write_bytes(b"\xff" * segment.stat().st_size)
    await side.say(Submit(request="r", prompt=(1,), sampling=GREEDY))
    assert await asyncio.to_thread(room.processes["engine"].wait, DEADLINE_S) == 0


async def test_it_ends_when_told_and_when_its_holder_is_gone(room: Room) -> None:
    await up(room)
    await room.holder.ok(Shutdown())
    assert await asyncio.to_thread(room.processes["engine"].wait, DEADLINE_S) == 0
    argv = ("worker.engines.process", "--instance-dir", str(room.directory), "--engine", "fake", "--source", str(room.data))
    script = f"""
import subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-m", *{argv!r}], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(engine.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    engine = Path(f"/proc/{int(await asyncio.to_thread(parent.stdout.readline))}")
    room.processes.pop("engine")
    room.holder.hang_up()
    assert (await room.holder.ok(Health())).attached is None
    parent.kill()
    parent.communicate()
    assert _runs(engine), "it stays as long as its holder's socket does"
    room.holder.hang_up()
    await room.holder.close()
    await room.until("the engine without a holder ends", lambda: not _runs(engine))


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _one_tensor() -> bytes:
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    return len(header).to_bytes(8, "little") + header + b"abcd"
