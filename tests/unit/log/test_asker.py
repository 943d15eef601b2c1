"""A request that is cancelled just as its answer comes ends all the same; a flush comes after what it is to flush."""

import asyncio
import time
from collections.abc import AsyncIterator

import nats.errors
import pytest
from nats.aio.msg import Msg

from controlplane.asker import Asker


class Unconnected(Asker):
    """Sends nothing; `answer` is what a server would do."""

    def __init__(self) -> None:
        super().__init__()
        self._resp_sub_prefix = bytearray(b"_INBOX.test.")

    async def publish(self, *_: object, **__: object) -> None:
        pass

    def answer(self) -> None:
        [awaited] = self._resp_map.values()
        awaited.set_result(Msg(self, "subject", "", b"answer"))


async def test_an_answer_is_returned() -> None:
    asker = Unconnected()
    asking = asyncio.create_task(asker.request("subject", timeout=30))
    await asyncio.sleep(0)
    asker.answer()
    assert (await asking).data == b"answer"


@pytest.mark.parametrize("limit_s", [30, None])
@pytest.mark.parametrize("turns", range(3))
async def test_a_cancellation_that_meets_the_answer_counts(turns: int, limit_s: float | None) -> None:
    asker = Unconnected()
    asking = asyncio.create_task(asker.request("subject", timeout=limit_s))
    await asyncio.sleep(0)
    asker.answer()
    for _ in range(turns):
        await asyncio.sleep(0)
    late = asking.done()
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() or late


async def test_no_answer_is_the_clients_own_error() -> None:
    with pytest.raises(nats.errors.TimeoutError):
        await Unconnected().request("subject", timeout=0)


class Server:
    """What a client connects to; `heard` is every line that it sent, in order. It answers PINGs, while `answering`."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.answering = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1048576, "headers": true}\r\n')
        while line := await reader.readline():
            self.heard.append(line.strip())
            if line == b"PING\r\n" and self.answering:
                writer.write(b"PONG\r\n")
        writer.close()


@pytest.fixture(name="connected")
async def _connected() -> AsyncIterator[tuple[Server, Asker]]:
    heard = Server()
    async with await asyncio.start_server(heard.serve, "127.0.0.1", 0) as server:
        asker = Asker()
        await asker.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", allow_reconnect=False)
        heard.heard.clear()
        yield heard, asker
        await asker.close()


async def test_a_flush_comes_after_all_that_was_sent_before_it(connected: tuple[Server, Asker]) -> None:
    server, asker = connected
    await asker.subscribe("one")
    await asker.publish("two", b"payload")
    await asker.subscribe("three")
    await asker.flush(30)
    assert server.heard == [b"SUB one  1", b"PUB two  7", b"payload", b"SUB three  2", b"PING"]


async def test_a_flush_waits_for_what_was_sent_before_it_and_not_for_what_others_go_on_sending(
    connected: tuple[Server, Asker],
) -> None:
    server, asker = connected

    async def go_on() -> None:
        while True:
            await asker.publish("more", b"payload")
            await asyncio.sleep(0)

    beside = [asyncio.create_task(go_on()) for _ in range(3)]
    await asyncio.sleep(0.05)
    await asker.subscribe("one")
    await asker.flush(30)
    for one in beside:
        one.cancel()
    assert server.heard.index(b"SUB one  1") < server.heard.index(b"PING")


async def test_a_flush_that_is_not_answered_ends_with_the_clients_own_error(connected: tuple[Server, Asker]) -> None:
    server, asker = connected
    server.answering = False
    begun = time.monotonic()
    with pytest.raises(nats.errors.FlushTimeoutError):
        await asker.flush(0.3)
    assert 0.3 <= time.monotonic() - begun < 30
