"""Processes that are stopped and not killed: nothing about them ends by itself."""

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from controlplane.envelope import Recorded
from controlplane.rungs import Rung
from controlplane.silence import GATEWAY_S, NODE_S
from tests.plane import NODE, PlaneUnderTest, fake, grants_overlap, running
from tests.starvation import Starvation, starvation

MODEL = "m"
OTHER = "n"
TEXT = "a stream that stands still and must not do so for ever; " * 3
LONG = TEXT * 2 + TEXT[:60]
"""At 50 tokens a second it outlasts the standstill."""
STOOD_S = GATEWAY_S + 1.5
HUNG_S = 3.0
SEEN_S = 80.0
"""From a freeze to the caller's news: the question, the last one, two busy cores."""
SETTINGS = NODE + fake(MODEL, tokens_per_s=50) + fake(OTHER, load_ms=2000)
ENVIRONMENT = {"ENGINEHOUSE_DEADLINES": json.dumps({"pulse": 0.5, "hung": HUNG_S})}


@pytest.fixture(scope="module")
def plane() -> Iterator[PlaneUnderTest]:
    with running(SETTINGS, environment=ENVIRONMENT) as started:
        yield started


async def test_the_caller_of_a_frozen_engine_gets_a_typed_error_and_the_next_one_an_answer(plane: PlaneUnderTest) -> None:
    expected, before = await plane.chat(MODEL, TEXT), await plane.head()
    text, error = await _frozen_while_streaming(plane, "engine")
    assert text
    assert expected.startswith(text)
    assert isinstance(error, openai.APIError)
    assert "engine_died" in json.dumps(error.body), error
    assert await plane.chat(MODEL, "next")
    failures: list[Any] = [one.event for one in await plane.events("InstanceFailed", after=before)]
    assert [failed.code for failed in failures] == ["engine_hung"]
    assert not grants_overlap(await plane.events())


async def test_a_stream_goes_on_where_its_frozen_frontend_left_it(plane: PlaneUnderTest) -> None:
    expected = await plane.chat(MODEL, TEXT)
    assert await _frozen_while_streaming(plane, "frontend") == (expected, None)


async def test_a_web_process_that_was_taken_for_dead_serves_again_and_goes_on_serving(plane: PlaneUnderTest) -> None:
    expected, web, before = await plane.chat(MODEL, TEXT), plane.child("web"), await plane.head()

    async def closed() -> list[Any]:
        return await plane.events("GatewayClosed", after=before)

    plane.kill(web, signal.SIGSTOP)
    try:
        await plane.until(closed, "the gateway is given up")
    finally:
        plane.kill(web, signal.SIGCONT)

    async def opened() -> list[Any]:
        return await plane.events("GatewayOpened", after=before)

    await plane.until(opened, "the gateway has opened again")
    assert await plane.chat(MODEL, TEXT) == expected, "which takes some seconds"
    assert [one.event.code for one in await closed()] == ["silent"]


@pytest.mark.parametrize("carrier", ["nats", "decider"])
async def test_nobody_is_taken_for_dead_because_the_bus_or_the_decider_stood_still(plane: PlaneUnderTest, carrier: str) -> None:
    expected, before = await plane.chat(MODEL, "again"), await plane.head()
    running = [asyncio.create_task(plane.chat(MODEL, LONG)) for _ in range(3)]
    queued = asyncio.create_task(plane.chat(OTHER, TEXT))  # its climb is under way, and its report finds nobody

    async def accepted() -> bool:
        return len(await plane.events("RequestAccepted", after=before)) == 4

    await plane.until(accepted, "all are in the plane")
    assert await plane.chat(MODEL, "again") == expected, "so those before it have had the decider's answer"
    frozen = plane.child(carrier)
    with starvation({name: plane.child(name).pid for name in ("worker", "web")}) as measured:
        plane.kill(frozen, signal.SIGSTOP)
        try:
            await asyncio.wait(running, timeout=STOOD_S)
        finally:
            plane.kill(frozen, signal.SIGCONT)
        answers = await asyncio.wait_for(asyncio.gather(*running, queued), SEEN_S)
        assert all(TEXT in answer for answer in answers)
        assert await plane.chat(MODEL, "again") == expected, "and it goes on"

    async def ended() -> list[Any]:
        ours: set[Any] = {getattr(one.event, "request", "") for one in await plane.events("RequestAccepted", after=before)}
        ends = await plane.events("RequestFinished", "RequestFailed", "RequestCancelled", after=before)
        ours_ended = [one for one in ends if getattr(one.event, "request", "") in ours]
        return ours_ended if {getattr(one.event, "request", "") for one in ours_ended} == ours else []

    ends = await plane.until(ended, "all have ended")
    assert [one.type for one in ends] == ["RequestFinished"] * 6
    silences = await plane.events("GatewayClosed", "NodeFellSilent", after=before)
    assert [one for one in silences if not _starved(measured, one)] == []


def _starved(measured: Starvation, silence: Recorded) -> bool:
    """Whether the machine, not the freeze, kept that one from beating: for a third of the silence it got no processor, as the
    kernel measured. Beats come each second, so what falls silent unstarved has had its time to beat twice, and did not."""
    name, limit_s = ("worker", NODE_S) if silence.type == "NodeFellSilent" else ("web", GATEWAY_S)
    end_s = silence.at_ms / 1000
    return measured.of(name, end_s - limit_s - 1, end_s) > limit_s / 3


async def test_down_ends_what_is_frozen() -> None:
    plane = PlaneUnderTest(SETTINGS)
    try:
        plane.start()
        await plane.chat(MODEL, "hello")
        instance = await plane.serving(MODEL)
        parts = [plane.part(instance.instance, name) for name in ("engine", "holder", "frontend")]
        for one in (*parts, plane.child("worker"), plane.child("pool")):
            plane.kill(one, signal.SIGSTOP)
        assert plane.down() == 0
        assert not any(one.alive for one in parts)
    except BaseException:
        plane._remove(keep=True)
        raise
    plane.finish()


async def _frozen_while_streaming(plane: PlaneUnderTest, victim: str) -> tuple[str, Exception | None]:
    """Ask, freeze one in the middle of the answer, and return what the caller got of it."""
    await plane.chat(MODEL, "well?")
    instance = await plane.serving(MODEL)
    assert instance.rung is Rung.UP
    frozen = plane.part(instance.instance, victim)
    got: list[str] = []
    async with plane.openai() as client, asyncio.timeout(SEEN_S):
        try:
            stream: Any = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": TEXT}], stream=True
            )
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    got.append(chunk.choices[0].delta.content)
                if len(got) == 10 and frozen.alive:
                    plane.kill(frozen, signal.SIGSTOP)
        except (openai.APIError, httpx.HTTPError) as error:
            return "".join(got), error
    return "".join(got), None
