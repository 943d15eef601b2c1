"""Signs of life: what each part of a plane is asked, to see that it does more than exist.

True: it answered. False: it did not, though it was asked. None: it could not be asked, and nothing follows from that.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import nats.errors

from compose.readiness import answers
from compose.serverchild import ServerChild
from compose.supervisor import Supervisor
from controlplane import subjects
from controlplane.bus import Bus
from controlplane.plane import Plane
from pool.client import PoolClient, PoolRefused

CARRIER_S: Final = 2.0
"""For the bus itself."""
Ask = Callable[[int, float], Awaitable[bool | None]]
"""Asks the process of this pid, within so many seconds."""


def questions(plane: Plane, bus: Bus, supervisor: Supervisor) -> Mapping[str, Ask]:
    """For each child that is there, by name."""
    asked: dict[str, Ask] = {
        "decider": partial(over_bus, bus, subjects.ASK_PULSE),
        "worker": partial(over_bus, bus, subjects.pulse(plane.node)),
        "web": partial(_web, plane),
        "pool": partial(_pool, plane),
    }
    for name, child in supervisor.children.items():
        if isinstance(child, ServerChild):
            asked[name] = partial(_server, child)
    return {name: ask for name, ask in asked.items() if name in supervisor.children}


async def _server(child: ServerChild, _pid: int, deadline_s: float) -> bool:
    return await child.answers(deadline_s)


async def _web(plane: Plane, _pid: int, deadline_s: float) -> bool:
    return await answers(plane.web_host, plane.web_port, "/livez", deadline_s=deadline_s)


async def _pool(plane: Plane, _pid: int, deadline_s: float) -> bool:
    try:
        async with asyncio.timeout(deadline_s):
            client = await PoolClient.connect(plane.pool_socket, deadline_s=deadline_s)
            try:
                await client.describe(deadline_s=deadline_s)
            finally:
                await client.close()
    except PoolRefused:
        return True
    except (OSError, TimeoutError):
        return False
    return True


async def over_bus(bus: Bus, subject: str, pid: int, deadline_s: float) -> bool | None:
    """Another process's answer is that of another plane's, which leads while ours stands by."""
    connection = bus.nc.stats["reconnects"]
    if not bus.nc.is_connected:
        return None
    try:
        async with asyncio.timeout(deadline_s):
            answer = await bus.nc.request(subject, b"", timeout=None)
    except (nats.errors.Error, TimeoutError, OSError):
        # A bus that stood still had delivered the question, and the answer, had it gone on before now.
        carried = await bus.answers(CARRIER_S) and bus.nc.stats["reconnects"] == connection
        return False if carried else None
    return True if answer.data == str(pid).encode() else None
