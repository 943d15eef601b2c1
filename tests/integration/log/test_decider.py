"""The decider as a process: it reigns, answers over the bus, stands by, stops in order and comes back with the same state."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from controlplane import ids, subjects
from controlplane.bus import Bus
from controlplane.commands import Load, NodeSilent, OpenGateway, Order, Retry
from controlplane.fleet import fold
from controlplane.log.postgres import PostgresLog
from controlplane.plane import Plane
from controlplane.refusal import Code, Refused

REIGN_S = 60.0
END_S = 15.0
"""Of a process that is told to end, in order. `up` waits 5 s for it; here it has less than a core for itself."""
Start = Callable[[], Awaitable[asyncio.subprocess.Process]]


@asynccontextmanager
async def decider(plane: Plane) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controlplane.decider", "--data", plane.data, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def answering(bus: Bus) -> int:
    """Wait until a decider answers; return its epoch."""
    async with asyncio.timeout(REIGN_S):
        while True:
            try:
                return (await bus.state(timeout_s=1)).epoch
            except Refused:
                await asyncio.sleep(0.02)


@pytest.fixture
async def start(plane: Plane) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:
        yield lambda: stack.enter_async_context(decider(plane))


def opened(gateway: str, actor: str | None = None) -> Order:
    body = OpenGateway(gateway=gateway, host=f"host of {gateway}", pid=1)
    return Order(id=ids.new(ids.COMMAND), actor=actor or f"gateway:{gateway}", body=body)


async def test_it_answers_over_the_bus_and_repeats_its_answer(bus: Bus, start: Start, log: PostgresLog) -> None:
    await start()
    await answering(bus)
    order = opened("gw_1")
    first = await bus.command(subjects.COMMAND_GATEWAY, order)
    assert await bus.command(subjects.COMMAND_GATEWAY, order) == first
    assert (await bus.state()) == fold(await log.read(0))


async def test_a_text_with_a_nul_is_kept_without_it(bus: Bus, start: Start, log: PostgresLog) -> None:
    await start()
    await answering(bus)
    order = Order(id=ids.new(ids.COMMAND), actor="gateway:g", body=OpenGateway(gateway="g", host="a\0b", pid=1))
    await bus.command(subjects.COMMAND_GATEWAY, order)
    [event] = await log.of_command(order.id)
    assert getattr(event.event, "host", None) == "a\ufffdb"
    half = Order(id=ids.new(ids.COMMAND), actor="gateway:g", body=OpenGateway(gateway="g2", host="\udc80", pid=1))
    with pytest.raises(Refused) as refusal:
        await bus.command(subjects.COMMAND_GATEWAY, half)
    assert refusal.value.code is Code.INVALID


async def test_nobody_to_ask_is_unavailable(bus: Bus) -> None:
    with pytest.raises(Refused) as refusal:
        await bus.command(subjects.COMMAND_GATEWAY, opened("gw_1"))
    assert (refusal.value.code, refusal.value.retry_after_ms) == (Code.UNAVAILABLE, 1000)


async def test_sigterm_ends_it_in_order_and_the_next_one_has_its_state(bus: Bus, start: Start) -> None:
    first = await start()
    epoch = await answering(bus)
    for number in range(5):
        await bus.command(subjects.COMMAND_GATEWAY, opened(f"gw_{number}"))
    began = time.monotonic()
    first.send_signal(signal.SIGTERM)
    assert await first.wait() == 0
    assert time.monotonic() - began < END_S
    await start()
    assert await answering(bus) == epoch + 1
    assert set((await bus.state()).gateways) >= {f"gw_{number}" for number in range(5)}


async def test_a_standby_takes_over_from_a_killed_leader(bus: Bus, start: Start) -> None:
    leader = await start()
    epoch = await answering(bus)
    standby = await start()
    await bus.command(subjects.COMMAND_GATEWAY, opened("gw_1"))
    assert standby.returncode is None
    leader.send_signal(signal.SIGKILL)
    await leader.wait()
    assert await answering(bus) == epoch + 1
    assert "gw_1" in (await bus.state()).gateways


async def test_a_standby_ends_at_once(bus: Bus, start: Start) -> None:
    await start()
    await answering(bus)
    standby = await start()
    assert standby.stderr is not None
    standby.send_signal(signal.SIGTERM)
    async with asyncio.timeout(END_S):
        assert await standby.wait() in {0, -signal.SIGTERM}  # the latter: it had not come to its handlers yet


async def test_commands_on_the_wrong_subject_are_refused(bus: Bus, start: Start) -> None:
    await start()
    await answering(bus)
    wrong = [
        (subjects.COMMAND_GATEWAY, Order(id="cmd_1", actor="operator:o", body=Load(model="m"))),
        (subjects.COMMAND_OPERATOR, opened("gw_1")),
        (subjects.COMMAND_GATEWAY, opened("gw_1", actor="node:n1")),
        (subjects.COMMAND_GATEWAY, opened("gw_1", actor="desk")),
        (subjects.command_node("n1"), Order(id="cmd_2", actor="node:n1", body=NodeSilent(node="n1"))),
        (subjects.command_node("n1"), Order(id="cmd_3", actor="node:n1", body=Retry(model="m"))),
    ]
    for subject, order in wrong:
        with pytest.raises(Refused) as refusal:
            await bus.command(subject, order)
        assert refusal.value.code is Code.INVALID
    reply = await bus.nc.request(subjects.COMMAND_GATEWAY, b"{", timeout=10)
    assert b"not a command" in reply.data


async def test_a_silent_gateway_is_closed(bus: Bus, start: Start) -> None:
    await start()
    await answering(bus)
    await bus.command(subjects.COMMAND_GATEWAY, opened("gw_1"))
    await bus.command(subjects.COMMAND_GATEWAY, opened("gw_2"))
    async with asyncio.timeout(REIGN_S):
        while "gw_1" in (state := await bus.state()).gateways:
            await bus.publish(subjects.beat_gateway("gw_2"), subjects.GatewayBeat(gateway="gw_2", at_ms=0))
            await asyncio.sleep(0.1)
    assert "gw_2" in state.gateways
