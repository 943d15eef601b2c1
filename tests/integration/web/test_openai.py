"""The OpenAI API, asked by the real client."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from controlplane.subjects import Progress
from tests.integration.web.house import DEADLINE_S, House, until
from web.openai import responses


async def test_a_chat_completion_brings_a_model_up_and_answers(house: House) -> None:
    await house.register("alpha")
    answer = await house.chat()
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)
    await house.settled("RequestFinished")
    (finished,) = await house.events("RequestFinished")
    assert (finished.event.prompt_tokens, finished.event.completion_tokens) == (7, 3)
    assert house.node.frontend.aborted == []


async def test_a_stream_brings_the_same_text_with_its_usage(house: House) -> None:
    await house.register("alpha")
    stream = await house.chat(stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "one two three"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 10
    assert chunks[-1].choices == []
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_a_completion_streamed_and_not(house: House) -> None:
    await house.register("alpha")
    whole = await house.ai.completions.create(model="alpha", prompt="hello")
    stream = await house.ai.completions.create(model="alpha", prompt=["hello"], stream=True)
    assert whole.choices[0].text == "".join([chunk.choices[0].text async for chunk in stream]) == "one two three"


async def test_a_waiting_stream_says_why_and_where_it_stands(house: House) -> None:
    await house.register("alpha")
    house.node.climb.clear()
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with house.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        async with asyncio.timeout(DEADLINE_S):
            first = await anext(lines)
            assert response.status_code == 200
            assert first.startswith(": waiting, place 1: alpha climbs on cpu0")
            (instance,) = await until(lambda: house.services.view.fleet.instances)
            house.node.progress = (Progress(subject=instance, step="mapping_weights", done=1 << 20, total=4 << 20),)
            told = await anext(line async for line in lines if "mapping" in line)
        assert told.endswith("mapping weights, 25 % (1.0 MiB of 4.0 MiB)"), told
        house.node.climb.set()
        rest = [line async for line in lines]
    assert rest[-2] == "data: [DONE]"


async def test_a_stream_that_fails_soon_has_its_own_status(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its model, so nothing is said for a while (a second, and here as long as it must be): not even 200."""
    monkeypatch.setattr(responses._Stream, "hold_s", DEADLINE_S)
    await house.register("alpha")
    house.node.climb.clear()
    call = asyncio.create_task(house.chat(stream=True))
    await until(lambda: house.services.view.fleet.requests)
    (request,) = house.services.view.fleet.requests
    assert (await house.client.delete(f"/api/requests/{request}")).status_code == 202
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    assert (caught.value.status_code, caught.value.code) == (410, "cancelled")
    house.node.climb.set()


async def test_who_will_not_wait_is_refused_at_once_and_nothing_is_loaded_for_him(house: House) -> None:
    """SL1: the whole device is held, another asks without waiting; after its release the same place can be had."""
    await house.register("alpha", "beta")
    patient = house.ai.with_options(default_headers={"Prefer": "wait=0"})
    message = [{"role": "user", "content": "x"}]

    async def impatient(**fields: Any) -> Any:
        return await patient.chat.completions.create(model="alpha", messages=message, **fields)  # type: ignore[arg-type]

    house.node.script.gate.clear()
    holding = asyncio.create_task(house.chat("beta"))
    await until(lambda: any(i.running for i in house.services.view.fleet.instances.values()))
    for streamed in (False, True):
        with pytest.raises(openai.APIStatusError) as caught:
            await impatient(stream=streamed)
        assert (caught.value.status_code, caught.value.code) == (503, "busy")
        assert int(caught.value.response.headers["retry-after"]) >= 1
    house.node.script.gate.set()
    await holding
    with pytest.raises(openai.APIStatusError):  # beta is idle now, and yet it isn't up
        await impatient()
    assert [event.model for event in house.node.directed] == ["beta"]
    assert (await house.chat("alpha")).choices[0].message.content == "one two three"
    assert (await impatient()).choices[0].message.content == "one two three"


async def test_who_waits_so_long_and_no_longer_is_told_when_that_is_over(house: House) -> None:
    await house.register("alpha")
    house.node.climb.clear()
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}]}
    response = await house.client.post("/v1/chat/completions", json=body, headers={"prefer": "respond-async, wait=1"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
    assert "retry-after" in response.headers
    await house.settled("RequestFailed")
    house.node.climb.set()
    response = await house.client.post("/v1/chat/completions", json=body, headers={"prefer": "wait=soon"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Prefer")


async def test_models_are_listed_with_their_aliases(house: House) -> None:
    await house.register("alpha", aliases=("a",))
    listed = [model.id async for model in house.ai.models.list()]
    assert listed == ["a", "alpha"]
    assert (await house.ai.models.retrieve("a")).id == "a"
    with pytest.raises(openai.NotFoundError):
        await house.ai.models.retrieve("beta")
    assert (await house.chat("a")).model == "a"


async def test_an_unknown_model_is_404_with_the_nearest_name(house: House) -> None:
    await house.register("alpha")
    with pytest.raises(openai.NotFoundError, match="did you mean 'alpha'") as caught:
        await house.chat("alpa")
    assert caught.value.code == "model_unknown"
    assert caught.value.param == "model"


@pytest.mark.parametrize("name", ["..", "a/../b", "x" * 300, "модель", "a\x00b", "a\nb", "", "\u202e"])
async def test_names_that_no_model_can_have_are_refused(house: House, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await house.chat(name)
    assert caught.value.param == "model"
    assert await house.endings() == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"), ({"messages": []}, "messages"), ({"messages": [{"role": 3}]}, "messages[0].role"),
        ({"messages": None}, "messages"), ({"n": 2}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"stop": [""]}, "stop[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{}]}, "tools"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 4096}, "max_tokens"), ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ],
)  # fmt: skip
async def test_a_bad_parameter_is_400_with_its_name(house: House, fields: dict[str, object], param: str) -> None:
    await house.register("alpha")
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}], **fields}
    response = await house.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert house.node.directed == []


async def test_a_prompt_that_is_too_long_is_refused_before_anything_is_loaded(house: House) -> None:
    await house.register("alpha")
    house.node.measured = 5000
    long = [{"role": "user", "content": "word " * 4000}]
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        await house.ai.chat.completions.create(model="alpha", messages=long)  # type: ignore[arg-type]
    assert caught.value.code == "too_long"
    assert "5000" in caught.value.message
    assert house.node.directed == []
    house.node.measured = 1000
    answer = await house.ai.chat.completions.create(model="alpha", messages=long)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "one two three"
    assert house.node.measures == 2


async def test_a_node_that_cannot_measure_a_prompt_is_no_fault_of_the_callers(house: House) -> None:
    """Its source may be away for a moment: the frontend counts anyway."""
    await house.register("alpha")
    house.node.measured = None
    long = [{"role": "user", "content": "word " * 4000}]
    answer = await house.ai.chat.completions.create(model="alpha", messages=long)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "one two three"
    assert house.node.measures == 1


async def test_what_the_frontend_finds_wrong_is_the_callers_400(house: House) -> None:
    await house.register("alpha")
    await house.chat()
    house.node.script.reject = (400, {"code": "invalid", "message": "roles must alternate", "param": "messages"})
    with pytest.raises(openai.BadRequestError, match="alternate") as caught:
        await house.chat(stream=True)
    assert caught.value.param == "messages"
    await house.settled("RequestFinished", "RequestFailed")


async def test_wrong_and_missing_tokens_are_401_in_openais_shape(house: House) -> None:
    for token in ("eh_nope_nope", "sk-something", house.token + "x"):
        client = openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key=token, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        await client.close()
    async with httpx.AsyncClient(base_url=house.url, timeout=DEADLINE_S) as bare:
        response = await bare.get("/v1/models")
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"


async def test_bodies_above_the_limit_are_413(house: House) -> None:
    response = await house.client.post("/v1/completions", content=b"x" * (9 << 20))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "too_large"


async def test_a_body_that_is_not_json_is_400(house: House) -> None:
    for content in (b"", b"{", b"[]", b'{"model": "\xff"}'):
        response = await house.client.post("/v1/chat/completions", content=content)
        assert response.status_code == 400, response.text
        assert "error" in response.json()


async def test_a_model_that_fails_to_start_is_503_with_retry_after(house: House) -> None:
    await house.register("alpha")
    house.node.fail_climbs = 2
    with pytest.raises(openai.APIStatusError) as caught:
        await house.chat()
    assert caught.value.status_code == 503
    assert int(caught.value.response.headers["retry-after"]) >= 1
    await house.settled("RequestFailed")
    with pytest.raises(openai.APIStatusError) as caught:
        await house.chat(stream=True)
    assert caught.value.status_code == 503
    assert caught.value.code == "backing_off"
    assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_many_callers_of_one_load_are_served_by_it(house: House) -> None:
    await house.register("alpha")
    house.node.climb.clear()
    calls = [asyncio.create_task(house.chat()) for _ in range(20)]
    await until(lambda: len(house.services.view.fleet.requests) == 20)
    house.node.climb.set()
    answers = await asyncio.gather(*calls)
    assert {answer.choices[0].message.content for answer in answers} == {"one two three"}
    assert len(house.node.directed) == 1
    await house.settled(*["RequestFinished"] * 20)
