"""The rung `checkpoint` on a whole plane, over the driver's twin: page, REST, CLI, idling, deaths, requests that are kept."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.fleet import Fleet, Instance
from controlplane.rungs import Rung
from tests.plane import NODE, PlaneUnderTest, fake, running

IDLE = '{ sleep = "300ms", checkpoint = "300ms", cold = "never" }'
SETTINGS = (
    NODE + fake("a", share="1/2", gpu=True) + fake("idler", share="1/4", gpu=True, idle=IDLE, context_tokens=3000)
    + fake("poisoned", share="1/4", gpu=True, fail="restore_fails:1") + fake("slow", share="1/4", gpu=True, tokens_per_s=40)
    + fake("plain", share="1/4")
)  # fmt: skip


@pytest.fixture(scope="module")
def house() -> Iterator[PlaneUnderTest]:
    with running(SETTINGS) as plane:
        yield plane


def of(fleet: Fleet, model: str) -> Instance | None:
    return next((i for i in fleet.instances.values() if i.model == model), None)


async def off(house: PlaneUnderTest, model: str) -> Instance:
    """Wait until the model's engine is off its device."""

    def there(fleet: Fleet) -> Instance | None:
        found = of(fleet, model)
        return found if found is not None and found.rung is Rung.CHECKPOINT else None

    return await house.until_fleet(there, f"{model} is checkpointed")


async def last_up(house: PlaneUnderTest, model: str) -> Any:
    return [e.event for e in await house.events("InstanceUp") if getattr(e.event, "model", "") == model][-1]


async def test_a_model_leaves_its_device_by_command_and_comes_back_for_the_next_request(house: PlaneUnderTest) -> None:
    await house.inspected("a", "idler", "poisoned", "slow", "plain")
    before = await house.chat("a", "as ever")
    done = house.cli("checkpoint", "a")
    assert done.returncode == 0, done.stderr
    found = await off(house, "a")
    assert (found.bytes_used, found.grant) == (0, None)
    assert found.host_bytes > 1 << 20
    await house.seen()
    async with house.rest() as http:
        shown = next(i for i in (await http.get("/api/instances")).json() if i["instance"] == found.instance)
        assert shown["rung"] == "checkpoint"

        async def told() -> Any:
            fleet = await house.fleet()
            off_device = sum(i.host_bytes for i in fleet.instances.values() if i.rung is Rung.CHECKPOINT)
            said = (await http.get("/api/nodes")).json()[0]["host"]
            return said if said["checkpointed_bytes"] == pytest.approx(off_device, rel=0.2) else None

        host = await house.until(told, "the node's figure is the sum of those that are off their devices")
        assert host["checkpoint_bytes"] > host["checkpointed_bytes"], "by default what is left beside pool and devices, half"
        assert 'enginehouse_host_bytes{kind="checkpointed",node="n1"}' in (await http.get("/metrics")).text
        assert "off their devices" in (await http.get("/")).text
    assert await house.chat("a", "as ever") == before
    up = await last_up(house, "a")
    assert up.pid == found.pid
    assert "cuda_restore" in [step.name for step in up.steps]


async def test_an_engine_without_a_gpu_is_refused_by_name(house: PlaneUnderTest) -> None:
    async with house.rest() as http:
        answer = await http.post("/api/models/plain/checkpoint")
    assert (answer.status_code, answer.json()["code"], answer.json()["details"]["reason"]) == (400, "not_available", "no_cuda")
    assert house.cli("checkpoint", "plain").returncode == 1


async def test_what_idles_leaves_its_device_after_its_own_time(house: PlaneUnderTest) -> None:
    await house.chat("idler", "once")
    await off(house, "idler")
    causes = [e.event for e in await house.events("InstanceDirected") if getattr(e.event, "rung", None) is Rung.CHECKPOINT]
    assert getattr(causes[-1], "code", "") == "idle"


async def test_a_request_that_meets_a_lost_process_is_answered_all_the_same(house: PlaneUnderTest) -> None:
    """C17: the request that was queued is kept."""
    before = await house.chat("poisoned", "what was it")
    assert house.cli("checkpoint", "poisoned").returncode == 0
    found = await off(house, "poisoned")
    failures = len(await house.events("InstanceFailed"))
    assert await house.chat("poisoned", "what was it") == before
    up = await last_up(house, "poisoned")
    assert (up.instance, up.pid != found.pid) == (found.instance, True)
    assert len(await house.events("InstanceFailed")) == failures


async def test_an_order_to_leave_waits_for_the_answer_that_is_being_given(house: PlaneUnderTest) -> None:
    text = "twenty-odd words that take about a second to say"
    talking = asyncio.create_task(house.chat("slow", text))
    await house.until_fleet(lambda fleet: (found := of(fleet, "slow")) and found.running, "it talks")
    done = await asyncio.to_thread(house.cli, "checkpoint", "slow", "--json")
    assert json.loads(done.stdout)["state"] == "succeeded"
    assert text in await talking
    await off(house, "slow")


async def test_it_outlives_the_worker_and_the_next_one_brings_it_back(house: PlaneUnderTest) -> None:
    await house.chat("a", "first")
    assert house.cli("checkpoint", "a").returncode == 0
    found = await off(house, "a")
    hellos = len(await house.events("NodeJoined"))
    house.kill(house.child("worker"))

    async def back() -> bool:
        return len(await house.events("NodeJoined")) > hellos

    await house.until(back, "the next worker says hello")
    assert (await off(house, "a")).pid == found.pid
    await house.chat("a", "second")
    assert (await last_up(house, "a")).pid == found.pid
