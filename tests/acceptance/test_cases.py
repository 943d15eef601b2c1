"""Situations that broke others, on a whole plane with one device, so that every model is in every other's way."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from controlplane import ids
from controlplane.answer import Opened
from controlplane.commands import Load, Order, Stop
from controlplane.envelope import Recorded
from controlplane.fleet import Fleet
from controlplane.rungs import Rung
from controlplane.subjects import COMMAND_OPERATOR
from tests.plane import STEP_S, PlaneUnderTest, fake, grants_overlap, running

SETTINGS = (
    '[node]\npool_bytes = "256MiB"\ndrain = "1s"\ndevices = [{ name = "cpu0", bytes = "64MiB" }]\n'
    + fake("a")
    + fake("b")
    + fake("slow", load_ms=1500, tokens_per_s=40)
    + fake("dozy", idle='{ sleep = "300ms", cold = "never" }', sleep_ms=150, context_tokens=5000)
    + fake("flaky", fail="start:2", context_tokens=5001)
    + fake("stuck", ignore_stop=True, tokens_per_s=20, context_tokens=5002)
    + fake("hold", tokens_per_s=20, context_tokens=5003)
    + fake("late", load_ms=120_000, context_tokens=5004)
    + fake("crowd", load_ms=5000, tokens_per_s=40, context_tokens=5005)
)
LONG = "x" * 400
"""The fake engine says it back: ten seconds at 40 tokens/s."""


@pytest.fixture(scope="module")
def narrow() -> Iterator[PlaneUnderTest]:
    with running(SETTINGS) as plane:
        yield plane


def asked(text: str = "hi", **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **options}


async def ended(plane: PlaneUnderTest, after: int, count: int = 1) -> list[Recorded]:
    """Wait for so many ends of requests."""

    async def found() -> list[Recorded] | None:
        events = await plane.events("RequestFinished", "RequestFailed", "RequestCancelled", after=after)
        return events if len(events) >= count else None

    return list(await plane.until(found, f"{count} requests end"))


async def settled(plane: PlaneUnderTest) -> Fleet:
    """Wait until no request is open and no instance is on its way."""

    def quiet(fleet: Fleet) -> Fleet | None:
        return fleet if not fleet.requests and all(i.directive_settled for i in fleet.instances.values()) else None

    found: Fleet = await plane.until_fleet(quiet, "the plane is quiet")
    return found


async def test_c02_an_idle_limit_that_meets_a_request_loses_nothing(narrow: PlaneUnderTest) -> None:
    await narrow.chat("dozy", "first")
    for offset_ms in (-50, -20, 0, 10, 20, 50, 120, 200, 600):
        until = time.monotonic() + (300 + offset_ms) / 1000
        await asyncio.sleep(until - time.monotonic())
        assert await narrow.chat("dozy", "again")
    await narrow.until_fleet(
        lambda fleet: all(
            one.directive_settled and one.rung is Rung.SLEEP for one in fleet.instances.values() if one.model == "dozy"
        ),
        "dozy sleeps again",
    )
    assert await narrow.chat("a")


async def test_c04_what_was_loaded_for_a_request_serves_it_before_it_leaves(narrow: PlaneUnderTest) -> None:
    await narrow.chat("dozy")
    await settled(narrow)
    before = await narrow.head()
    answers = await asyncio.gather(narrow.chat("a", "1"), narrow.chat("b", "2"), narrow.chat("a", "3"))
    assert all(f"user: {n}" in text for n, text in zip("123", answers, strict=True))
    assert [event.type for event in await ended(narrow, before, 3)] == ["RequestFinished"] * 3


async def test_c10_a_load_whose_caller_has_left_gives_way_to_who_waits(narrow: PlaneUnderTest) -> None:
    before = await narrow.head()
    wrong = asyncio.create_task(narrow.chat("late"))

    await narrow.until_fleet(
        lambda fleet: any(r.model == "late" and r.code == "climbing" for r in fleet.requests.values()), "the load is under way"
    )
    wrong.cancel()
    began = time.monotonic()
    assert "right" in await narrow.chat("a", "right")
    assert time.monotonic() - began < 60, "the load of two minutes was called back"
    directed = [one.event for one in await narrow.events("InstanceDirected", after=before)]
    assert [(e.rung, e.victim_of) for e in directed if e.code == "evicted"][-1] == (Rung.COLD, "a")  # type: ignore[union-attr]
    assert sorted(one.type for one in await ended(narrow, before, 2)) == ["RequestCancelled", "RequestFinished"]


async def test_c11_one_of_several_callers_of_a_load_leaves(narrow: PlaneUnderTest) -> None:
    await settled(narrow)
    before = await narrow.head()
    calls = [asyncio.create_task(narrow.chat("crowd", f"{n}")) for n in range(10)]

    def climbing(fleet: Fleet) -> bool:
        waiting = [r for r in fleet.requests.values() if r.model == "crowd"]
        return len(waiting) == 10 and all(r.code == "climbing" for r in waiting)

    await narrow.until_fleet(climbing, "the load is under way")
    first = (await narrow.events("RequestAccepted", after=before))[0].event
    async with narrow.rest() as http:  # whoever came first; then its connection too
        assert (await http.delete(f"/api/requests/{first.request}")).status_code == 202  # type: ignore[union-attr]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(one, str) for one in results) == 9
    assert len(await narrow.events("InstanceUp", after=before)) == 1
    cancelled = await narrow.events("RequestCancelled", after=before)
    assert [one.event.completion_tokens for one in cancelled] == [0]  # type: ignore[union-attr]


async def test_c13_two_loads_for_the_last_place_take_turns(narrow: PlaneUnderTest) -> None:
    for _ in range(5):
        assert all(await asyncio.gather(narrow.chat("a"), narrow.chat("b")))
    assert not grants_overlap(await narrow.events())


async def test_c14_what_can_never_fit_is_refused_with_both_numbers_and_moves_nobody(narrow: PlaneUnderTest) -> None:
    await narrow.chat("a")
    await settled(narrow)
    before = await narrow.head()
    big = {"name": "big", "source": "fake:big", "engine": "fake", "share": 1}
    async with narrow.rest() as http:
        answer = await http.post("/api/models", json=big | {"arguments": {"weight_bytes": "80MiB"}})
    assert (answer.status_code, answer.json()["code"]) == (400, "cannot_fit")
    assert "has 64.0 MiB" in answer.json()["message"]
    assert "needs 80.0 MiB" in answer.json()["message"]
    with pytest.raises(openai.NotFoundError):
        await narrow.chat("big")
    of_a_busy_machine = {"NodeFellSilent", "NodeHeardAgain", "GatewayClosed", "GatewayOpened"}
    assert {one.type for one in await narrow.events(after=before)} - of_a_busy_machine == set()
    assert await narrow.serving("a")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", ["queued", "climbing", "running"])
async def test_c35_a_caller_that_goes_away_stops_the_work(narrow: PlaneUnderTest, phase: str, streamed: bool) -> None:
    async with _ready_for(narrow, phase) as model, narrow.rest() as http:
        before = await narrow.head()
        call = asyncio.create_task(http.post("/v1/chat/completions", json=asked(LONG, model=model, stream=streamed)))
        await _in_phase(narrow, phase, model)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        end: Any = await _end_of(narrow, model, before)
    assert (type(end).__name__, getattr(end, "by", ""), getattr(end, "phase", "")) == ("RequestCancelled", "caller", phase)
    assert end.completion_tokens < len(LONG), "the engine did not go on to the end"
    await settled(narrow)


@pytest.mark.parametrize("phase", ["queued", "climbing", "running"])
async def test_n27_a_request_is_cancelled_by_an_operator_wherever_it_is(narrow: PlaneUnderTest, phase: str) -> None:
    async with _ready_for(narrow, phase) as model, narrow.rest() as http:
        before = await narrow.head()
        call = asyncio.create_task(http.post("/v1/chat/completions", json=asked(LONG, model=model)))
        await _in_phase(narrow, phase, model)
        accepted: Any = (await narrow.events("RequestAccepted", after=before))[0].event
        assert (await http.delete(f"/api/requests/{accepted.request}")).status_code == 202
        answer = await call
        end: Any = await _end_of(narrow, model, before)
    assert answer.status_code >= 400
    assert answer.json()["error"]["code"] == "cancelled"
    assert (type(end).__name__, getattr(end, "by", ""), getattr(end, "phase", "")) == ("RequestCancelled", "operator", phase)
    await settled(narrow)


@contextlib.asynccontextmanager
async def _ready_for(plane: PlaneUnderTest, phase: str) -> AsyncIterator[str]:
    """Bring the plane to where a request for the model given will stay in that phase long enough to be met there."""
    await settled(plane)
    if phase == "running":
        await plane.chat("slow", "warm")
        await settled(plane)  # the end of that one is recorded a moment after its answer
        yield "slow"
        return
    await plane.chat("hold")
    if phase == "climbing":
        yield "late"
        assert plane.cli("stop", "late").returncode == 0
        return
    assert plane.cli("stop", "slow").returncode == 0
    held = asyncio.create_task(plane.chat("hold", "y" * 500))
    await plane.until_fleet(lambda fleet: any(i.running for i in fleet.instances.values()), "the device is busy")
    yield "slow"
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)


async def _end_of(plane: PlaneUnderTest, model: str, after: int) -> Any:
    """The event that ended the request for it; its own end would be ten seconds away."""

    async def found() -> Any:
        events = await plane.events("RequestFinished", "RequestFailed", "RequestCancelled", after=after)
        return next((one.event for one in events if getattr(one.event, "model", "") == model), None)

    return await plane.until(found, "the request ends")


async def _in_phase(plane: PlaneUnderTest, phase: str, model: str) -> None:
    def there(fleet: Fleet) -> bool:
        request = next((r for r in fleet.requests.values() if r.model == model), None)
        if request is None:
            return False
        match phase:
            case "running":
                return request.instance is not None
            case "climbing":
                return request.code == "climbing"
            case _:
                return request.code == "slot_busy"

    await plane.until_fleet(there, f"the request is {phase}")
    if phase == "running":
        await asyncio.sleep(0.2)  # into the stream: some tokens have been made


async def test_c40_a_failure_has_a_back_off_and_a_retry_and_success_clears_it(narrow: PlaneUnderTest) -> None:
    async with narrow.openai() as client:  # one, and over one connection: the second asks within the two seconds' pause

        async def ask() -> None:
            await client.chat.completions.create(model="flaky", messages=[{"role": "user", "content": "hi"}])

        with pytest.raises(openai.InternalServerError) as caught:
            await ask()  # both climbs that it may see fail
        assert caught.value.status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            await ask()
    assert caught.value.code == "backing_off"
    assert re.search(r"failed to start twice, last: .*; next try in [\d.]+ s, or", caught.value.message)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert (await narrow.fleet()).models["flaky"].set_back is not None
    retried = narrow.cli("retry", "flaky")
    assert retried.returncode == 0 and "cleared" in retried.stdout
    assert "hi" in await narrow.chat("flaky", "hi")
    assert (await narrow.fleet()).models["flaky"].set_back is None


async def test_c41_an_engine_that_ignores_its_end_does_not_stay_stopping(narrow: PlaneUnderTest) -> None:
    calls = [asyncio.create_task(narrow.chat("stuck", "z" * 10, max_tokens=60)) for _ in range(8)]
    instance = await narrow.serving("stuck")
    engine = narrow.part(instance.instance, "engine")
    async with narrow.rest() as http:
        accepted = await http.post("/api/models/stuck/stop")
        assert accepted.status_code == 202
        worker = narrow.child("worker")
        narrow.kill(worker)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, (str, openai.APIStatusError)) for one in answers), answers

        async def over() -> bool:
            found = (await http.get(f"/api/operations/{accepted.json()['operation']}")).json()
            return bool(found["state"] != "open")

        await narrow.until(over, "the stop has an end")
    assert await engine.ended(30)
    assert instance.instance not in (await narrow.fleet()).instances
    assert await narrow.chat("a")


async def test_c46_a_command_that_comes_again_is_done_once(narrow: PlaneUnderTest) -> None:
    narrow.cli("stop", "slow")
    before = await narrow.head()
    order = Order(id=ids.new(ids.COMMAND), actor="operator:test", body=Load(model="slow"))
    async with narrow.bus() as bus:
        first = await bus.command(COMMAND_OPERATOR, order, timeout_s=STEP_S)
        again = [await bus.command(COMMAND_OPERATOR, order, timeout_s=STEP_S) for _ in range(4)]
        narrow.kill(narrow.child("worker"))
        again.append(await bus.command(COMMAND_OPERATOR, order, timeout_s=STEP_S))
    assert isinstance(first, Opened)
    assert all(isinstance(one, Opened) and one.operation == first.operation for one in again)
    await narrow.serving("slow")
    await settled(narrow)
    assert len(await narrow.events("OperationRequested", after=before)) == 1
    assert len(await narrow.events("InstanceUp", after=before)) == 1
    assert len(await narrow.events("InstanceCreated", after=before)) == 1


async def test_c49_a_model_that_another_has_stopped_comes_back_for_its_caller(narrow: PlaneUnderTest) -> None:
    before = await narrow.head()
    assert narrow.cli("load", "a").returncode == 0
    assert narrow.cli("stop", "a").returncode == 0
    assert await narrow.chat("a", "still")
    async with narrow.bus() as bus:  # both at the same instant
        orders = [
            Order(id=ids.new(ids.COMMAND), actor=f"operator:{who}", body=body)
            for who, body in (("one", Load(model="a")), ("two", Stop(model="a")))
        ]
        await asyncio.gather(*(bus.command(COMMAND_OPERATOR, order, timeout_s=STEP_S) for order in orders))
    assert await narrow.chat("a", "and still")
    await settled(narrow)
    actors = {event.actor for event in await narrow.events("OperationRequested", after=before)}
    assert {"operator:one", "operator:two"} <= actors


async def test_a_prompt_that_is_too_long_is_refused_before_anything_is_loaded(narrow: PlaneUnderTest) -> None:
    narrow.cli("stop", "slow")
    before = await narrow.head()
    with pytest.raises(openai.APIStatusError) as caught:
        await narrow.chat("slow", "w" * 10_000)
    assert caught.value.status_code in (400, 413)
    assert await narrow.events("InstanceDirected", "RequestAccepted", after=before) == []


async def test_a_bad_parameter_is_named(narrow: PlaneUnderTest) -> None:
    async with narrow.rest() as http:
        answer: httpx.Response = await http.post("/v1/chat/completions", json=asked(model="a", temperature="hot"))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"
