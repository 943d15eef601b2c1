"""Ends in batches: few messages, none lost, one id per batch until it is acknowledged."""

import asyncio
from typing import Any

import pytest

from controlplane.answer import Done
from controlplane.commands import End, EndRequests, Order
from controlplane.refusal import Code, Refused
from web.ends import FLUSH_COUNT, Ends


class Decider:
    """Takes batches; is away for the next `away` of them."""

    def __init__(self) -> None:
        self.away = 0
        self.refusal = Code.UNAVAILABLE
        self.orders: list[Order] = []
        self.taken: list[tuple[End, ...]] = []

    async def command(self, _: str, order: Order, *, timeout_s: float = 5.0) -> Done:
        self.orders.append(order)
        if self.away:
            self.away -= 1
            raise Refused(self.refusal, "away")
        assert isinstance(order.body, EndRequests)
        self.taken.append(order.body.ends)
        return Done(position=1)


def end(number: int) -> End:
    return End(request=f"req_{number}", outcome="finished")


async def running(decider: Any, numbers: range) -> Ends:
    ends = Ends(decider, "gateway:x")
    task = asyncio.create_task(ends.run())
    for number in numbers:
        ends.add(end(number))
    assert await ends.flush(5)
    task.cancel()
    return ends


async def test_many_ends_go_in_few_batches_in_order() -> None:
    decider = Decider()
    await running(decider, range(1000))
    assert [e.request for batch in decider.taken for e in batch] == [f"req_{n}" for n in range(1000)]
    assert len(decider.taken) <= 5


async def test_a_batch_is_sent_again_with_its_id_until_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.ends.RETRY_S", 0)
    decider = Decider()
    decider.away = 3
    await running(decider, range(2))
    assert len(decider.orders) == 4
    assert len({order.id for order in decider.orders}) == 1
    assert len(decider.taken) == 1


async def test_a_full_batch_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.ends.FLUSH_S", 60.0)
    decider = Decider()
    ends = Ends(decider, "gateway:x")  # type: ignore[arg-type]
    task = asyncio.create_task(ends.run())
    await asyncio.sleep(0)
    for number in range(FLUSH_COUNT):
        ends.add(end(number))
    async with asyncio.timeout(20):
        while not decider.taken:
            await asyncio.sleep(0)
    task.cancel()


async def test_what_is_not_acknowledged_yet_is_known() -> None:
    ends = Ends(Decider(), "gateway:x")  # type: ignore[arg-type]
    ends.add(end(1))
    assert ends.holds("req_1")
    assert not ends.holds("req_2")
    assert len(ends) == 1
    assert not await ends.flush(0.01)
