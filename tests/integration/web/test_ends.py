"""Every accepted request ends exactly once, whatever happens to its caller, its engine, its frontend and the plane."""

import asyncio
import contextlib
import re
from typing import Any

import msgspec
import openai
import pytest
from click.testing import CliRunner

from compose.cli.commands import enginehouse
from controlplane import ids
from controlplane.commands import CloseGateway, Order
from controlplane.subjects import COMMAND_GATEWAY
from tests.integration.web.house import DEADLINE_S, House, until
from web import auth, keyring
from web.tokens import new_token, revoke_token, split

BODY = {"model": "alpha", "messages": [{"role": "user", "content": "x"}]}


async def dropped(house: House, reached: Any, **fields: Any) -> None:
    """Call, wait until `reached`, close the connection; it must have ended soon, long before any deadline of its own."""
    call = asyncio.create_task(_ask(house, **fields))
    await until(reached)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: not house.services.view.fleet.requests, 15)


async def warm(house: House) -> None:
    """Model alpha is up, and nothing runs."""
    await house.register("alpha")
    await house.chat()
    await house.settled("RequestFinished")
    await until(lambda: not house.services.view.fleet.requests)


async def _ask(house: House, token: str = "", **fields: Any) -> list[str]:
    headers = {"authorization": f"Bearer {token or house.token}"}
    async with house.client.stream("POST", "/v1/chat/completions", json={**BODY, **fields}, headers=headers) as response:
        return [line async for line in response.aiter_lines()]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_who_leaves_while_queued_is_cancelled(house: House, stream: bool) -> None:
    await house.register("alpha")
    house.node.climb.clear()
    await dropped(house, lambda: house.services.view.fleet.requests, stream=stream)
    await house.settled("RequestCancelled")
    (cancelled,) = await house.events("RequestCancelled")
    assert (cancelled.event.by, cancelled.event.phase) == ("caller", "climbing")
    assert house.node.frontends == {}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_who_leaves_while_it_runs_stops_the_engine(house: House, stream: bool) -> None:
    await warm(house)
    house.node.script.gate.clear()
    await dropped(house, lambda: house.node.frontend.running, stream=stream)
    await house.settled("RequestFinished", "RequestCancelled")
    (cancelled,) = await house.events("RequestCancelled")
    assert (cancelled.event.by, cancelled.event.phase, cancelled.event.completion_tokens) == ("caller", "running", 2)
    assert house.node.frontend.aborted == [cancelled.event.request]
    await until(lambda: house.node.frontend.running == 0)


async def test_one_of_ten_callers_of_a_load_leaves_and_nine_are_answered(house: House) -> None:
    await house.register("alpha")
    house.node.climb.clear()
    calls = [asyncio.create_task(_ask(house, stream=True)) for _ in range(10)]
    await until(lambda: len(house.services.view.fleet.requests) == 10)
    calls[0].cancel()
    await until(lambda: len(house.services.view.fleet.requests) == 9)
    house.node.climb.set()
    answers = await asyncio.gather(*calls[1:])
    assert all(answer[-2] == "data: [DONE]" for answer in answers)
    await house.settled(*["RequestFinished"] * 9, "RequestCancelled")
    assert len(house.node.directed) == 1
    assert len(house.node.frontend.generated) == 9


async def test_a_hundred_normal_ends_send_no_abort(house: House) -> None:
    await warm(house)
    await asyncio.gather(*(house.chat() for _ in range(100)))
    await house.settled(*["RequestFinished"] * 101)
    assert house.node.frontend.aborted == []


@pytest.mark.parametrize("stream", [True, False])
async def test_an_operators_cancel_reaches_the_caller_and_the_engine(
    house: House, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    await warm(house)
    house.node.script.gate.clear()
    call = asyncio.create_task(_ask(house, stream=stream))
    await until(lambda: house.node.frontend.running)
    (request,) = await until(lambda: list(house.services.view.fleet.requests))
    assert (await house.client.delete(f"/api/requests/{request}")).status_code == 202
    async with asyncio.timeout(DEADLINE_S):
        lines = await call
    assert "cancelled by the operator" in "".join(lines)
    await house.settled("RequestFinished", "RequestCancelled")
    await until(lambda: house.node.frontend.aborted == [request])
    told = (await house.client.get(f"/api/requests/{request}")).json()
    assert (told["phase"], told["prompt_tokens"], told["completion_tokens"]) == ("running", None, None), "nobody had counted"
    monkeypatch.setenv("ENGINEHOUSE_URL", house.url)
    monkeypatch.setenv("ENGINEHOUSE_TOKEN", house.token)
    shown = await asyncio.to_thread(CliRunner().invoke, enginehouse, ["requests"])
    assert re.search(rf"{request} .* \? +by operator while running", shown.output), shown.output


async def test_an_operators_cancel_of_a_queued_request(house: House) -> None:
    await house.register("alpha")
    house.node.climb.clear()
    call = asyncio.create_task(house.chat())
    (request,) = await until(lambda: list(house.services.view.fleet.requests))
    await house.client.delete(f"/api/requests/{request}")
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    assert caught.value.code == "cancelled"
    await house.settled("RequestCancelled")
    assert (await house.client.delete(f"/api/requests/{request}")).status_code == 404


@pytest.fixture
async def lent(house: House, monkeypatch: pytest.MonkeyPatch) -> str:
    """A token that stops working soon after it is revoked."""
    monkeypatch.setattr(keyring, "TTL_S", 0.0)
    monkeypatch.setattr(auth, "WATCH_S", 0.05)
    return await new_token(house.plane.postgres_url, "ada")


async def revoke(house: House, token: str) -> None:
    assert await revoke_token(house.plane.postgres_url, (split(token) or ("",))[0])


@pytest.mark.parametrize("stream", [True, False])
async def test_what_runs_for_a_token_ends_when_it_is_revoked_and_nothing_else_does(
    house: House, stream: bool, lent: str
) -> None:
    await warm(house)
    house.node.script.gate.clear()
    call = asyncio.create_task(_ask(house, lent, stream=stream))
    await until(lambda: house.node.frontend.running)
    (request,) = await until(lambda: list(house.services.view.fleet.requests))
    others = asyncio.create_task(_ask(house, stream=stream))
    await until(lambda: house.node.frontend.running == 2)
    await revoke(house, lent)
    async with asyncio.timeout(DEADLINE_S):
        lines = await call
    last = lines[-4].removeprefix("data: ") if stream else lines[0]
    error = msgspec.json.decode(last)["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "token_revoked")
    await until(lambda: house.node.frontend.aborted == [request])
    house.node.script.gate.set()
    await others
    await house.settled("RequestFinished", "RequestFailed", "RequestFinished")
    (failed,) = await house.events("RequestFailed")
    assert (failed.event.request, failed.event.code, failed.event.completion_tokens) == (request, "token_revoked", 2)


async def test_what_waits_for_a_token_ends_when_it_is_revoked(house: House, lent: str) -> None:
    await house.register("alpha")
    house.node.climb.clear()
    async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=lent, max_retries=0) as client:
        call = asyncio.create_task(client.completions.create(model="alpha", prompt="x"))
        await until(lambda: house.services.view.fleet.requests)
        await revoke(house, lent)
        with pytest.raises(openai.AuthenticationError) as caught:
            await call
    assert caught.value.code == "token_revoked"
    await house.settled("RequestFailed")


async def test_an_answer_goes_on_while_the_database_of_tokens_is_away(
    house: House, lent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm(house)
    house.node.script.gate.clear()
    call = asyncio.create_task(_ask(house, lent, stream=True))
    await until(lambda: house.node.frontend.running)
    looks = 0

    async def away(_: str) -> None:
        nonlocal looks
        looks += 1
        raise ConnectionRefusedError

    monkeypatch.setattr(house.services.keyring, "_look_up", away)
    await until(lambda: looks > 1)
    house.node.script.gate.set()
    assert (await call)[-2] == "data: [DONE]"
    await house.settled("RequestFinished", "RequestFinished")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_connection_is_taken_up_again_without_loss_or_repetition(house: House, stream: bool) -> None:
    await house.register("alpha")
    house.node.script.cut_after = 2
    if stream:
        text = "".join([c.choices[0].delta.content or "" async for c in await house.chat(stream=True)])
    else:
        text = (await house.chat()).choices[0].message.content
    assert text == "one two three"
    await house.settled("RequestFinished")
    assert [after for _, after in house.node.frontend.reattached] == [len("one two ")]
    assert len(house.node.frontend.generated) == 1


async def test_a_frontend_that_comes_back_elsewhere_within_five_seconds_loses_nothing(house: House) -> None:
    await warm(house)
    house.node.script.gate.clear()
    call = asyncio.create_task(house.chat())
    await until(lambda: house.node.frontend.running)
    await house.node.frontend.stop()
    house.node.script.gate.set()
    await house.node.frontend.start()
    assert (await call).choices[0].message.content == "one two three"
    await house.settled("RequestFinished", "RequestFinished")


async def test_an_engine_that_dies_before_anything_was_sent_is_tried_once_more(house: House) -> None:
    await warm(house)
    house.node.script.fault = {"code": "engine_died", "message": "killed by signal 9"}
    call = asyncio.create_task(house.chat(stream=True))
    await until(lambda: len(house.node.frontend.generated) == 2)
    (instance,) = house.node.frontends
    await house.node.fail(instance)
    assert "".join([c.choices[0].delta.content or "" async for c in await call]) == "one two three"
    await house.settled("RequestFinished", "RequestFinished")
    assert len(await house.events("RequestInterrupted")) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("sent", [0, 1])
async def test_who_will_not_wait_is_told_at_once_that_the_engine_has_died(house: House, stream: bool, sent: int) -> None:
    """The worker has not even noticed: nothing is queued for him, and his request has one end."""
    await warm(house)
    house.node.script.fault = {"code": "engine_died", "message": "killed by signal 9"}
    house.node.script.fault_after = sent
    async with asyncio.timeout(15):
        response = await house.client.post("/v1/chat/completions", json=BODY | {"stream": stream}, headers={"prefer": "wait=0"})
    if stream:  # its 200 is out with the first word of the frontend
        assert response.status_code == 200 and '"code":"engine_died"' in response.text.replace(" ", "")
    else:
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_died")
        assert "killed by signal 9" in response.text and int(response.headers["retry-after"]) >= 1
    await house.settled("RequestFinished", "RequestFailed")
    assert not await house.events("RequestInterrupted")
    assert (await house.events("RequestFailed"))[0].event.code == "engine_died"


async def test_an_engine_that_dies_amid_a_stream_is_an_error_for_it(house: House) -> None:
    await warm(house)
    house.node.script.fault = {"code": "engine_died", "message": "killed by signal 9"}
    house.node.script.fault_after = 1
    stream = await house.chat(stream=True)
    with pytest.raises(openai.APIError, match="killed by signal 9"):
        _ = [chunk async for chunk in stream]
    await house.settled("RequestFinished", "RequestFailed")
    (failed,) = await house.events("RequestFailed")
    assert failed.event.code == "engine_died"


async def test_an_engine_that_dies_amid_an_answer_that_is_not_streamed_is_tried_once_more(house: House) -> None:
    await warm(house)
    house.node.script.fault = {"code": "engine_died", "message": "killed by signal 9"}
    house.node.script.fault_after = 2
    call = asyncio.create_task(house.chat())
    await until(lambda: len(house.node.frontend.generated) == 2)
    (instance,) = house.node.frontends
    await house.node.fail(instance)
    assert (await call).choices[0].message.content == "one two three"
    await house.settled("RequestFinished", "RequestFinished")


async def test_a_restarted_decider_ends_what_was_running_once(house: House) -> None:
    await warm(house)
    house.node.script.gate.clear()
    call = asyncio.create_task(house.chat(stream=True))
    await until(lambda: house.node.frontend.running)
    await house.kill_decider()
    house.node.script.gate.set()
    assert "".join([c.choices[0].delta.content or "" async for c in await call]) == "one two three"
    with pytest.raises(openai.APIStatusError) as caught:
        await house.chat()
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]
    house.start_decider()
    await until(lambda: _answers(house))
    await until(lambda: not house.services.view.fleet.requests)
    await house.ended_once()


async def test_ends_wait_for_a_decider_and_are_not_lost(house: House) -> None:
    await warm(house)
    house.node.script.gate.clear()
    calls = [asyncio.create_task(house.chat()) for _ in range(5)]
    await until(lambda: house.node.frontend.running == 5)
    await house.kill_decider()
    house.node.script.gate.set()
    await asyncio.gather(*calls)
    assert len(house.services.gateway.ends) == 5
    house.start_decider()
    await until(lambda: len(house.services.gateway.ends) == 0)
    await house.settled(*["RequestFinished"] * 6)


async def test_a_stopping_web_process_tells_callers_and_ends_their_requests(house: House) -> None:
    await warm(house)
    house.node.script.gate.clear()
    streaming = asyncio.create_task(_ask(house, stream=True))
    waiting = asyncio.create_task(house.chat())
    await until(lambda: house.node.frontend.running == 2)
    await house.services.stop_streams()
    assert "stopping" in "".join(await streaming)
    with pytest.raises(openai.APIStatusError) as caught:
        await waiting
    assert caught.value.status_code == 503
    await house.settled("RequestFinished", "RequestCancelled", "RequestCancelled")
    assert {e.event.by for e in await house.events("RequestCancelled")} == {"gateway"}
    await until(lambda: len(house.node.frontend.aborted) == 2)


async def test_a_caller_whose_gateway_was_taken_for_dead_is_told_to_ask_again(house: House) -> None:
    await warm(house)
    house.node.script.gate.clear()
    call = asyncio.create_task(house.chat())
    await until(lambda: house.node.frontend.running)
    known = house.services.gateway.gateway
    order = Order(id=ids.new(ids.COMMAND), actor=f"gateway:{known}", body=CloseGateway(gateway=known, code="stopped"))
    await house.bus.command(COMMAND_GATEWAY, order)
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    assert (caught.value.status_code, caught.value.code) == (503, "request_lost")
    assert "send it again" in caught.value.message
    await house.settled("RequestFinished", "RequestCancelled")


async def test_a_gateway_that_was_taken_for_dead_opens_again(house: House) -> None:
    await warm(house)
    before = house.services.gateway.gateway
    order = Order(id=ids.new(ids.COMMAND), actor=f"gateway:{before}", body=CloseGateway(gateway=before, code="stopped"))
    await house.bus.command(COMMAND_GATEWAY, order)
    assert (await house.chat()).choices[0].message.content == "one two three"
    assert house.services.gateway.gateway != before
    await house.settled("RequestFinished", "RequestFinished")


async def _answers(house: House) -> bool:
    with contextlib.suppress(openai.APIError):
        return bool(await house.chat())
    return False
