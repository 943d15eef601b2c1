"""Whom a worker asks whether they are still there."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from worker.deadlines import Deadlines
from worker.moves import EngineState, Observed
from worker.pulse import Pulse


class Local:
    """An instance whose holder counts what it is asked."""

    instance = "ins_1"

    def __init__(self, seen: Observed) -> None:
        self.seen, self.holder, self.asked = seen, self, asyncio.Event()
        self.site = SimpleNamespace(deadlines=Deadlines(pulse=0.0))

    async def ask(self, *, deadline_s: float) -> None:
        self.asked.set()
        await asyncio.sleep(0)


async def test_a_holder_that_waits_for_its_first_engine_is_asked_and_so_does_not_leave() -> None:
    local: Any = Local(Observed(present=True, holder=True, engine=EngineState.ABSENT))
    pulse = Pulse(local)
    pulse.feel()
    async with asyncio.timeout(10):
        await local.asked.wait()
    await pulse.stop()


@pytest.mark.parametrize("seen", [Observed(), Observed(present=True)])
async def test_where_no_holder_was_started_nobody_is_asked(seen: Observed) -> None:
    local: Any = Local(seen)
    pulse = Pulse(local)
    pulse.feel()
    assert pulse.felt == ()
