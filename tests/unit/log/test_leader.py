"""When leadership is taken for lost."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from controlplane.log import leader
from controlplane.log.leader import Leadership


class Session:
    """A connection that answers, is late, or is broken, as it is told, and answers ever after."""

    def __init__(self, *answers: Exception | None) -> None:
        self._answers: Iterator[Exception | None] = iter(answers)
        self.asked = 0
        self.over: Callable[[Any], None] = lambda _: None

    def add_termination_listener(self, over: Callable[[Any], None]) -> None:
        self.over = over

    async def fetchval(self, _query: str) -> int:
        self.asked += 1
        if (error := next(self._answers, None)) is not None:
            raise error
        return 1


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "PROBE_S", 0.001)


async def _ends(session: Session) -> bool:
    lost = asyncio.create_task(Leadership(session, 1).lost())
    try:
        async with asyncio.timeout(10):
            while not lost.done() and session.asked < 8:
                await asyncio.sleep(0)
        return lost.done()
    finally:
        lost.cancel()


async def test_one_late_answer_is_no_loss_since_it_may_be_we_who_stood_still() -> None:
    assert not await _ends(Session(TimeoutError(), None, TimeoutError(), None))


async def test_two_late_answers_in_a_row_are() -> None:
    assert await _ends(Session(None, TimeoutError(), TimeoutError()))


async def test_a_broken_session_is_at_once() -> None:
    assert await _ends(Session(ConnectionResetError()))


async def test_a_session_that_the_server_ends_is_at_once() -> None:
    session = Session()
    leadership = Leadership(session, 1)
    session.over(session)
    async with asyncio.timeout(10):
        await leadership.lost()
