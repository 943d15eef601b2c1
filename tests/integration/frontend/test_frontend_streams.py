"""The frontend with the fake engine, both real processes over their real sockets."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.engineroom import DEADLINE_S, Room, lines, whole, wish
from worker.engines.messages import Drain, State
from worker.sources.fakes import fake_source


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    yield room
    await room.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fake_source(tmp_path, "m", 2**16)


SOON_S = 15.0
"""By itself the engine would go on for 40 s: it does not stop, and has room for 4,096 tokens at a hundred a second."""
LONG = "Žluťoučký kůň 👩🏽‍🚀 ภาษาไทย 漢字 " * 12


async def test_a_chat_is_streamed_and_leaves_nothing_behind(room: Room, source: Path) -> None:
    await room.up(source)
    async with room.http.post("/generate", json=wish(text="Příliš 👩🏽‍🚀")) as response:
        assert response.status == 200
        assert response.content_type == "application/x-ndjson"
        got = [line async for line in lines(response)]
    prompt = "user: Příliš 👩🏽‍🚀\nassistant: "
    text = f"You said: {prompt}"
    assert got[0] == {"t": "start", "prompt_tokens": len(prompt.encode())}
    assert "".join(line["text"] for line in got[1:-1]) == text
    assert got[-1] == {
        "t": "end", "finish_reason": "stop", "prompt_tokens": len(prompt.encode()),
        "completion_tokens": len(text.encode()), "chars": len(text),
    }  # fmt: skip
    await room.until("the record is gone", lambda: not list((room.directory / "record").iterdir()))
    assert (await room.status())["running"] == 0


async def test_stop_string_over_token_borders_ends_the_engine_too(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=2000, ignore_stop=True)
    async with room.http.post("/generate", json=wish(text="one END-OF-ROW two", stop=["END-OF-ROW", "zzz"])) as response:
        text, last = await whole(response)
    assert text == "You said: user: one "
    assert (last["finish_reason"], last["completion_tokens"]) == ("stop", len(text) + len("END-OF-ROW"))
    await room.until("the engine stops", lambda: _idle(room))


async def test_max_tokens_in_mid_character(room: Room, source: Path) -> None:
    """C31."""
    await room.up(source)
    async with room.http.post("/generate", json=wish(text="ř", max_tokens=len("You said: user: ") + 1)) as response:
        text, last = await whole(response)
    assert text == "You said: user: \ufffd"
    assert last["finish_reason"] == "length"


async def test_refusals_name_the_parameter_and_both_numbers(room: Room, source: Path) -> None:
    await room.up(source, context_tokens=100)
    await room.serve(source, grant=1, context_tokens=100)
    for body, status, code, param in [
        (wish(text="x" * 200), 400, "too_long", "messages"),
        (wish(max_tokens=99), 400, "too_long", "max_tokens"),
        (wish(temperature=9), 400, "invalid", "temperature"),
        (wish(n=2), 400, "invalid", "n"),
        ({**wish(), "grant": 7}, 409, "not_serving", None),
        ({**wish(), "request": "../x"}, 400, "invalid", "request"),
        ({**wish(), "kind": "image"}, 400, "invalid", "kind"),
    ]:
        async with room.http.post("/generate", json=body) as response:
            got = await response.json()
            assert (response.status, got["code"], got["param"]) == (status, code, param), got
            if code == "too_long":
                assert "100" in got["message"]
    async with room.http.post("/generate", json=wish(), headers={"Authorization": "Bearer wrong"}) as response:
        assert response.status == 401
    async with room.http.post("/generate", data=b"{") as response:
        assert response.status == 400


async def test_a_request_waits_a_moment_for_its_grant(room: Room, source: Path) -> None:
    await room.up(source)

    async def ask(grant: int) -> tuple[int, dict[str, object]]:
        async with room.http.post("/generate", json={**wish(f"req_{grant}"), "grant": grant}) as response:
            return response.status, (await whole(response))[1] if response.status == 200 else await response.json()

    for grant in range(2, 12):
        asking, began = asyncio.create_task(ask(grant)), time.monotonic()
        await asyncio.sleep(0)
        await room.serve(source, grant=grant)
        took_s = time.monotonic() - began
        status, last = await asking
        if status == 200:
            break
        assert (status, last["code"]) == (409, "not_serving") and took_s > 0.5, "it was there in time"
    assert last["t"] == "end"


async def test_a_repeated_request_is_not_run_again(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=200)
    async with room.http.post("/generate", json=wish()) as first:
        async with room.http.post("/generate", json=wish()) as second:
            assert (second.status, (await second.json())["code"]) == (409, "request_exists")
        assert (await whole(first))[1]["t"] == "end"
    async with room.http.post("/generate", json=wish()) as third:
        assert third.status == 409


async def test_delete_aborts_in_the_engine_at_once(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=100, ignore_stop=True)
    async with room.http.post("/generate", json=wish()) as response:
        stream = lines(response)
        await anext(stream)
        await anext(stream)
        async with room.http.delete("/requests/req_1") as deleted:
            count = (await deleted.json())["completion_tokens"]
        rest = [line async for line in stream]
    assert count >= 1
    assert (rest[-1]["t"], rest[-1]["code"]) == ("error", "aborted")
    await room.until("the engine stops", lambda: _idle(room), SOON_S)
    await room.until("the record is gone", lambda: not list((room.directory / "record").iterdir()))


async def test_a_reader_that_goes_away_ends_the_work(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=100, ignore_stop=True)
    response = await room.http.post("/generate", json=wish())
    stream = lines(response)
    await anext(stream)
    await anext(stream)
    response.close()
    await room.until("the engine stops", lambda: _idle(room), SOON_S)
    await room.until("the record is gone", lambda: not list((room.directory / "record").iterdir()))


async def test_a_reader_that_comes_back_in_time_gets_the_rest(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=400)
    response = await room.http.post("/generate", json=wish(text=LONG))
    had = await _some(response, 30)
    response.close()
    async with room.http.get(f"/requests/req_1?after_chars={len(had)}") as again:
        rest, last = await whole(again)
    assert had + rest == f"You said: user: {LONG}\nassistant: "
    assert last["chars"] == len(had + rest)


async def test_frontend_killed_in_mid_stream_loses_and_repeats_nothing(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=400)
    response = await room.http.post("/generate", json=wish(text=LONG, stop=["never"]))
    had = await _some(response, 50)
    room.kill("frontend")
    had += await _some(response, 10**9)
    response.close()
    await room.start_frontend()
    async with room.http.get(f"/requests/req_1?after_chars={len(had)}") as again:
        assert again.status == 200
        rest, last = await whole(again)
    assert had + rest == f"You said: user: {LONG}\nassistant: "
    assert (last["t"], last["finish_reason"]) == ("end", "stop")
    assert last["completion_tokens"] == len((had + rest).encode())
    await room.until("the engine forgets it", lambda: _idle(room))


async def test_frontend_killed_twice_and_the_end_comes_meanwhile(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=1000)
    response = await room.http.post("/generate", json=wish(text=LONG))
    had = await _some(response, 20)
    room.kill("frontend")
    had += await _some(response, 10**9)
    response.close()
    await room.until("the engine is through", lambda: _idle(room))
    await room.start_frontend()
    room.kill("frontend")
    await room.start_frontend()
    async with room.http.get(f"/requests/req_1?after_chars={len(had)}") as again:
        rest, last = await whole(again)
    assert had + rest == f"You said: user: {LONG}\nassistant: "
    assert last["t"] == "end"


async def test_engine_killed_gives_every_reader_a_typed_error(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=100, ignore_stop=True)
    responses = [await room.http.post("/generate", json=wish(f"req_{n}")) for n in range(3)]
    for response in responses:
        await _some(response, 5)
    room.kill("engine")
    for response in responses:
        _text, last = await whole(response)
        assert (last["t"], last["code"]) == ("error", "engine_died")
        assert last["completion_tokens"] >= 5
    async with room.http.post("/generate", json=wish("req_late")) as response:
        _, last = await whole(response)
    assert last["code"] == "engine_died"


async def test_engine_told_to_crash_crashes(room: Room, source: Path) -> None:
    await room.up(source, fail="generate_after:5")
    async with room.http.post("/generate", json=wish()) as response:
        text, last = await whole(response)
    assert (text, last["code"]) == ("You s", "engine_died")
    assert room.processes["engine"].wait(DEADLINE_S) == -signal.SIGKILL


async def test_drain_waits_for_the_running_and_shutting_admission_stops_new_ones(room: Room, source: Path) -> None:
    await room.up(source, tokens_per_s=15)  # two seconds
    async with room.http.post("/generate", json=wish()) as response:
        await _some(response, 3)
        async with room.http.delete("/serving") as shut:
            assert (await shut.json())["running"] == 1
        draining = asyncio.create_task(room.holder.tell(Drain(deadline_ms=30_000)))
        async with room.http.post("/generate", json=wish("req_2")) as refused:
            assert (await refused.json())["code"] == "not_serving"
        assert (await whole(response))[1]["t"] == "end"
        drained = await draining
    assert isinstance(drained, State)
    assert drained.running == 0


async def test_many_requests_end_without_a_trace(room: Room, source: Path) -> None:
    await room.up(source, max_num_seqs=16)

    async def one(n: int) -> str:
        async with room.http.post("/generate", json=wish(f"req_{n}", text=f"number {n}")) as response:
            return (await whole(response))[0]

    got = await asyncio.gather(*(one(n) for n in range(100)))
    assert got == [f"You said: user: number {n}\nassistant: " for n in range(100)]
    await room.until("no record is left", lambda: not list((room.directory / "record").iterdir()))
    assert await _idle(room)


async def _some(response: aiohttp.ClientResponse, chars: int) -> str:
    """Read deltas until there are so many characters, or the stream breaks."""
    text = ""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while len(text) < chars:
                raw = await response.content.readline()
                if not raw.endswith(b"\n"):
                    break
                line = json.loads(raw)
                text += line.get("text", "")
    except aiohttp.ClientError:
        pass
    return text


async def _idle(room: Room) -> bool:
    return await room.running() == 0
