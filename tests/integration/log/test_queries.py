"""What web reads beside the live state."""

from collections.abc import AsyncIterator, Sequence

import pytest

from controlplane.envelope import Recorded
from controlplane.events import GatewayOpened, OperationFailed, OperationRequested, OperationSucceeded
from controlplane.events.request import RequestAccepted, RequestCancelled, RequestFailed, RequestFinished
from controlplane.log.postgres import PostgresLog
from controlplane.queries import History
from controlplane.refusal import Code, Refused
from tests.chronicle import NOW_MS, Chronicle


def accepted(request: str, model: str) -> RequestAccepted:
    return RequestAccepted(request=request, model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=1)


def end(kind: type, request: str, model: str, **fields: str) -> RequestFinished | RequestFailed | RequestCancelled:
    ended: RequestFinished = kind(request=request, model=model, kind="chat", streamed=True, accepted_ms=NOW_MS, **fields)
    return ended


@pytest.fixture
async def history(database: str, log: PostgresLog) -> AsyncIterator[History]:
    chronicle = Chronicle()
    events = [
        *chronicle.record(GatewayOpened(gateway="gw_1", host="h", pid=1)),
        *chronicle.record(accepted("req_1", "a"), accepted("req_2", "b"), accepted("req_3", "a")),
        *chronicle.record(OperationRequested(operation="op_1", kind="load", model="a"), operation="op_1"),
        *chronicle.record(end(RequestFinished, "req_1", "a", finish_reason="stop")),
        *chronicle.record(end(RequestFailed, "req_2", "b", code="x", message="y")),
        *chronicle.record(end(RequestCancelled, "req_3", "a", by="caller", phase="running")),
        *chronicle.record(OperationSucceeded(operation="op_1", kind="load", model="a"), operation="op_1"),
        *chronicle.record(OperationFailed(operation="op_2", kind="stop", model="a", code="c", message="m")),
    ]
    await log.append(await log.begin_reign("h", 1), events)
    opened = History(database)
    yield opened
    await opened.close()


def positions(events: Sequence[Recorded]) -> list[int]:
    return [event.position for event in events]


async def test_events_are_paged_both_ways(history: History) -> None:
    assert positions(await history.events_after(2, limit=3)) == [3, 4, 5]
    assert positions(await history.page_of_events(before=None, limit=3)) == [10, 9, 8]
    assert positions(await history.page_of_events(before=4, limit=9)) == [3, 2, 1]
    assert positions(await history.events_after(0, limit=9, type="RequestAccepted")) == [2, 3, 4]
    assert positions(await history.page_of_events(before=None, limit=9, types=["GatewayOpened", "OperationRequested"])) == [
        5,
        1,
    ]
    assert [event.type for event in await history.of_stream("request:req_1")] == ["RequestAccepted", "RequestFinished"]
    assert await history.of_stream("request:req_none") == []
    assert await history.of_stream("request:\0") == [], "a text that no row can hold"


async def test_ended_requests_are_listed_by_model_and_outcome(history: History) -> None:
    assert positions(await history.page_of_ended(before=None, limit=9)) == [8, 7, 6]
    assert positions(await history.page_of_ended(before=None, limit=9, model="a")) == [8, 6]
    assert positions(await history.page_of_ended(before=8, limit=1)) == [7]
    assert positions(await history.page_of_ended(before=None, limit=9, outcome="cancelled")) == [8]
    assert positions(await history.page_of_ended(before=None, limit=9, model="b", outcome="finished")) == []


async def test_an_operation_is_told_with_who_asked_for_it(history: History) -> None:
    assert positions(await history.page_of_operation("op_1", before=None, limit=9)) == [9, 5]
    asked = await history.first_of_operations(["op_1", "op_none"])
    assert {name: event.position for name, event in asked.items()} == {"op_1": 5}


async def test_a_database_that_is_away_is_unavailable() -> None:
    away = History("postgresql://nobody@/none?host=/nowhere")
    with pytest.raises(Refused) as refusal:
        await away.events_after(0, limit=1)
    assert (refusal.value.code, refusal.value.retry_after_ms) == (Code.UNAVAILABLE, 2000)
    await away.close()
