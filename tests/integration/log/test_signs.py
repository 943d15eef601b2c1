"""Asking over the bus whether another process lives: what is its silence, and what is the bus's."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from compose.embedded.nats import EmbeddedNats
from compose.signs import over_bus
from controlplane import subjects
from controlplane.bus import Bus, give_pulse
from controlplane.parties import DECIDER, OPERATOR
from controlplane.plane import Login, Plane
from tests.servers import freeze

LOGINS = {party: Login(user=party, password="word") for party in (DECIDER, OPERATOR)}


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    async with EmbeddedNats(tmp_path / "nats", logins=LOGINS) as server:
        yield server


async def test_silence_over_the_bus_is_held_against_who_was_asked_only_while_the_bus_answers(nats: EmbeddedNats) -> None:
    plane = Plane(data="/", postgres_url="", nats_url=nats.url, nats_logins=LOGINS)
    async with AsyncExitStack() as stack:
        decider, up = [await Bus.connect(plane, party, party) for party in (DECIDER, OPERATOR)]
        stack.push_async_callback(up.close)
        stack.push_async_callback(decider.close)
        assert await over_bus(up, subjects.ASK_PULSE, os.getpid(), 5) is False, "nobody listens, and the bus says so"
        subscription = await decider.nc.subscribe(subjects.ASK_PULSE, cb=give_pulse)
        await decider.nc.flush(5)
        assert await over_bus(up, subjects.ASK_PULSE, os.getpid(), 30) is True
        assert await over_bus(up, subjects.ASK_PULSE, 1, 30) is None, "another plane's decider leads"
        await subscription.unsubscribe()
        await decider.nc.subscribe(subjects.ASK_PULSE, cb=_silent)
        await decider.nc.flush(5)
        assert await over_bus(up, subjects.ASK_PULSE, os.getpid(), 0.2) is False
        assert nats.process is not None
        await freeze(nats.process.pid)
        assert await over_bus(up, subjects.ASK_PULSE, os.getpid(), 0.2) is None
        nats.process.popen.send_signal(signal.SIGCONT)


async def _silent(_message: object) -> None: ...
