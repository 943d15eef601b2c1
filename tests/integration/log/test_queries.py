"""What web and the CLI read beside the live state."""

import hashlib
from collections.abc import AsyncIterator

import pytest
from sqlalchemy.exc import IntegrityError

from controlplane.events import GatewayOpened, OperationFailed, OperationRequested, OperationSucceeded
from controlplane.events.request import RequestAccepted, RequestCancelled, RequestFailed, RequestFinished
from controlplane.log.postgres import PostgresLog
from controlplane.queries import Queries
from tests.chronicle import NOW_MS, Chronicle


def accepted(request: str, model: str) -> RequestAccepted:
    return RequestAccepted(request=request, model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=1)


def end(kind: type, request: str, model: str, **fields: str) -> RequestFinished | RequestFailed | RequestCancelled:
    ended: RequestFinished = kind(request=request, model=model, kind="chat", streamed=True, accepted_ms=NOW_MS, **fields)
    return ended


@pytest.fixture
async def queries(database: str) -> AsyncIterator[Queries]:
    opened = Queries.open(database)
    yield opened
    await opened.close()


@pytest.fixture
async def history(log: PostgresLog) -> None:
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


@pytest.mark.usefixtures("history")
async def test_events_are_paged_both_ways(queries: Queries) -> None:
    assert await queries.head() == 10
    assert [event.position for event in await queries.events(after=2, limit=3)] == [3, 4, 5]
    assert [event.position for event in await queries.events(limit=3)] == [10, 9, 8]
    assert [event.position for event in await queries.events(before=4)] == [3, 2, 1]
    assert [event.position for event in await queries.events(type="RequestAccepted", after=0)] == [2, 3, 4]
    assert [event.type for event in await queries.events(stream="request:req_1", after=0)] == [
        "RequestAccepted",
        "RequestFinished",
    ]


@pytest.mark.usefixtures("history")
async def test_ended_requests_are_listed_by_model_and_time(queries: Queries) -> None:
    assert [event.position for event in await queries.requests()] == [8, 7, 6]
    assert [event.position for event in await queries.requests(model="a")] == [8, 6]
    assert [event.position for event in await queries.requests(before=8, limit=1)] == [7]
    assert [event.position for event in await queries.requests(since_ms=NOW_MS + 7, until_ms=NOW_MS + 8)] == [7]
    assert [event.type for event in await queries.request("req_2")] == ["RequestAccepted", "RequestFailed"]
    assert await queries.request("req_none") == []


@pytest.mark.usefixtures("history")
async def test_ended_operations_are_listed_newest_first(queries: Queries) -> None:
    assert [event.position for event in await queries.operations()] == [10, 9]
    assert [event.position for event in await queries.operations(before=10)] == [9]
    assert [event.position for event in await queries.operation("op_1")] == [5, 9]
    assert [event.position for event in await queries.operation("op_2")] == [10]


async def test_a_token_is_found_by_its_hash_until_it_is_revoked(queries: Queries) -> None:
    digest = hashlib.sha256(b"secret").digest()
    await queries.add_token(id="t1", name="ada's", digest=digest, scope="inference")
    found = await queries.token(digest)
    assert found is not None
    assert (found.id, found.name, found.scope, found.revoked_at) == ("t1", "ada's", "inference", None)
    assert await queries.token(b"other") is None
    assert await queries.revoke_token("t1")
    assert not await queries.revoke_token("t1")
    assert await queries.token(digest) is None
    assert [token.id for token in await queries.tokens()] == ["t1"]


async def test_a_token_of_an_unknown_scope_or_a_taken_id_is_refused(queries: Queries) -> None:
    await queries.add_token(id="t1", name="a", digest=b"1")
    for fields in ({"id": "t1", "digest": b"2"}, {"id": "t2", "digest": b"1"}, {"id": "t3", "digest": b"3", "scope": "root"}):
        with pytest.raises(IntegrityError):
            await queries.add_token(name="b", **fields)  # type: ignore[arg-type]


async def test_bodies_are_kept_once_and_dropped_by_age(queries: Queries) -> None:
    await queries.save_body("req_1", "d", b"{}")
    await queries.save_body("req_1", "d", b"other")
    assert await queries.body("req_1") == b"{}"
    assert await queries.drop_bodies(0) == 0
    assert await queries.drop_bodies(2**42) == 1
    assert await queries.body("req_1") is None
