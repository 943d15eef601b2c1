"""A worker's beat ends when it is told to, whatever happens at that moment."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controlplane.subjects import NodeBeat
from worker import beats
from worker.beats import Beats
from worker.board import Board


class Mute:
    """A bus that nobody hears."""

    async def publish(self, subject: str, message: object) -> None:
        pass


async def at_once() -> None:
    pass


@pytest.mark.parametrize("turns", range(5))
async def test_a_cancellation_that_meets_progress_counts(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beats, "SOONEST_S", 0.0)
    board = Board()
    site: Any = SimpleNamespace(board=board, plane=SimpleNamespace(node="n1", pool_bytes=0))
    beating = Beats(site, cast(Any, Mute()), cast(Any, None), cast(Any, None), "inc_1")
    monkeypatch.setattr(beating, "measure", at_once)
    task = asyncio.create_task(beating.run())
    for _ in range(20):  # it has sent one, and waits for progress
        await asyncio.sleep(0)
    board.show("ins_1", "stage")
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


async def test_a_beat_that_can_not_be_made_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node would be taken for dead although all of it serves, and nobody would be told why."""
    monkeypatch.setattr(beats, "SOONEST_S", 0.0)
    monkeypatch.setattr(beats, "EVERY_S", 0.0)
    sent = asyncio.Event()

    class Heard(Mute):
        async def publish(self, subject: str, message: object) -> None:
            sent.set()

    site: Any = SimpleNamespace(board=Board(), plane=SimpleNamespace(node="n1", pool_bytes=0))
    beating = Beats(site, cast(Any, Heard()), cast(Any, None), cast(Any, None), "inc_1")
    real, made = beating.beat, list[object]()

    def breaks() -> object:
        made.append(None)
        if len(made) < 3:
            raise ValueError("a fault of ours")
        return real()

    monkeypatch.setattr(beating, "beat", breaks)
    monkeypatch.setattr(beating, "measure", asyncio.Event().wait)
    task = asyncio.create_task(beating.run())
    async with asyncio.timeout(20):
        await sent.wait()
    task.cancel()
    await asyncio.wait([task], timeout=5)


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_first_beat_says_what_was_measured_and_does_not_wait_for_that_for_ever(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    monkeypatch.setattr(beats, "EVERY_S", 0.2)
    monkeypatch.setattr(beats, "SOONEST_S", 0.1)
    heard: asyncio.Queue[NodeBeat] = asyncio.Queue()

    class Heard(Mute):
        async def publish(self, subject: str, message: object) -> None:
            heard.put_nowait(cast(NodeBeat, message))

    async def measure() -> None:
        await (asyncio.Event().wait() if hangs else asyncio.sleep(0.02))
        beating._pool = (5, 9, False)

    site: Any = SimpleNamespace(board=Board(), plane=SimpleNamespace(node="n1", pool_bytes=9))
    beating = Beats(site, cast(Any, Heard()), cast(Any, None), cast(Any, None), "inc_1")
    monkeypatch.setattr(beating, "measure", measure)
    task = asyncio.create_task(beating.run())
    async with asyncio.timeout(20):
        first = await heard.get()
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert (first.pool_used_bytes, first.pool_ok) == ((0, True) if hangs else (5, False)), "nobody has said that it is away"
