"""One end for each request, also where its caller leaves while an engine is being told."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from immutables import Map

from controlplane.answer import Routed
from controlplane.commands import Admit, Order
from controlplane.fleet import Request
from web.attempt import Ask
from web.call import Call
from web.frontend import Line
from web.gateway import Gateway


class Decider:
    """Routes all that is admitted."""

    nc = SimpleNamespace(is_connected=True)

    async def command(self, _: str, order: Order, *, timeout_s: float = 5.0) -> Routed:
        assert isinstance(order.body, Admit)
        return Routed(
            position=1, request=order.body.request, instance="ins_1", node="n1", endpoint="http://x", grant=1, attempt=1,
            model="m",
        )  # fmt: skip


class SlowFrontends:
    """Generates for ever, and takes its time to stop."""

    def __init__(self) -> None:
        self.running, self.aborting, self.aborted = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(self, *_: object) -> AsyncGenerator[list[Line], None]:
        self.running.set()
        await asyncio.Event().wait()
        yield []

    async def abort(self, *_: object) -> int:
        self.aborting.set()
        await self.aborted.wait()
        return 7


async def test_a_request_whose_engine_is_being_told_to_stop_is_no_orphan() -> None:
    frontends, decider, view = SlowFrontends(), Decider(), PlainView()
    gateway: Any = Gateway(decider, view, frontends)  # type: ignore[arg-type]
    gateway.opened.set()
    ask = Ask(model="m", kind="chat", streamed=False, body=b"{}", prompt_bytes=1, max_tokens=None, body_sha256="")
    call = Call(gateway, ask)
    calling = asyncio.create_task(call.run(Sink()))
    await frontends.running.wait()
    long_ago = (time.time_ns() // 1_000_000) - 3_600_000
    view.fleet.requests = Map({
        call.request: Request(
            request=call.request, model="m", gateway=gateway.gateway, kind="chat", streamed=False, prompt_bytes=1,
            max_tokens=None, accepted_ms=long_ago, order=1, instance="ins_1",
        )
    })  # fmt: skip
    calling.cancel()
    await frontends.aborting.wait()
    await asyncio.wait([calling])
    gateway._sweep()
    frontends.aborted.set()
    await asyncio.gather(*gateway._loose)
    assert [(end.outcome, end.by, end.completion_tokens) for end in gateway.ends._waiting] == [("cancelled", "caller", 7)]


class PlainView:
    def __init__(self) -> None:
        self.fleet = SimpleNamespace(requests=Map(), instances=Map())

    def watching(self, *_: object) -> Any:
        return nullcontext()


class Sink:
    keepalive_s, hold_s, sends = None, 1.0, False

    async def waiting(self, reason: str, place: int) -> None: ...
    async def started(self) -> None: ...
    async def text(self, text: str) -> None: ...
    def restarted(self) -> None: ...
