"""With 100,000 finished requests in the history any page is there in 200 ms, whichever end of the log it shows (N30)."""

import time

import aiohttp
import asyncpg
import pytest

from controlplane.queries import History
from tests.busyplane import busy
from tests.staged import StagedPlane
from tests.stagehouse import Stagehouse

REQUESTS = 100_000
LIMIT_S = 0.2
MOST_TRIES = 50
"""Of a page: on a busy machine it takes some until one has a core for itself from its begin to its end."""
FILL = """
insert into event (position, stream, version, type, v, at, command, ordinal, actor, data)
select n, 'request:req_' || n, 4,
    case when n % 5000 = 0 then 'RequestFailed' else 'RequestFinished' end, 1,
    now() - (200000 - n) * interval '1 second', 'cmd_' || n, 0, 'gateway:gw_1',
    jsonb_build_object('request', 'req_' || n, 'model', case when n % 1000 = 0 then 'rare' else 'm' || n % 7 end,
        'kind', 'chat', 'streamed', true, 'accepted_ms', 1800000000000 + n, 'instance', 'ins_1', 'attempts', 1,
        'prompt_tokens', 12, 'completion_tokens', 34, 'queued_ms', 1, 'first_token_ms', 20, 'took_ms', 900)
    || case when n % 5000 = 0 then '{"code": "engine_died", "message": "it ended"}'::jsonb
            else '{"finish_reason": "stop"}'::jsonb end
from generate_series(1, $1::bigint) as n
"""
PATHS = {
    "newest": "/requests", "middle": f"/requests?before={REQUESTS // 2}", "oldest": "/requests?before=60",
    "a rare model": "/requests?model=rare", "no such model": "/requests?model=nobody",
    "failed": "/requests?outcome=failed", "failed, oldest": "/requests?outcome=failed&before=9000",
    "failed of a model": "/requests?outcome=failed&model=rare", "cancelled: none": "/requests?outcome=cancelled",
    "events": "/events", "events, oldest": "/events?before=60", "events of a type": "/events?type=RequestFailed",
    "events of no type": "/events?type=NodeJoined", "events of a kind that is not there": "/events?aggregate=node",
    "one event": "/events/77777", "one request": "/requests/req_4711", "an operation that is not there": "/operations/op_x",
}  # fmt: skip


@pytest.fixture(name="full")
async def _full(owner_database: str) -> None:
    connection = await asyncpg.connect(owner_database)
    try:
        await connection.execute(FILL.replace("$1", str(REQUESTS)))
        await connection.execute("analyze event")
    finally:
        await connection.close()


@pytest.mark.usefixtures("full")
async def test_any_page_of_a_long_history_is_there_in_200_ms(database: str) -> None:
    history, plane = History(database), busy(StagedPlane(time.time_ns() // 1_000_000))
    took: dict[str, float] = {}
    try:
        async with Stagehouse(plane, history=history).open() as house, aiohttp.ClientSession(house.url) as client:
            for name, path in PATHS.items():
                times = list[float]()
                while len(times) < 5 or (min(times) >= LIMIT_S and len(times) < MOST_TRIES):
                    started = time.perf_counter()
                    async with client.get(path) as answer:
                        text = await answer.text()
                    times.append(time.perf_counter() - started)
                    assert answer.status == (404 if "operations" in path else 200), path
                    assert len(text) < 200_000
                took[name] = min(times)  # what the page takes; what the machine does meanwhile only adds to it
    finally:
        await history.close()
    print({name: round(seconds * 1000, 1) for name, seconds in took.items()})
    assert {name: seconds for name, seconds in took.items() if seconds >= LIMIT_S} == {}
