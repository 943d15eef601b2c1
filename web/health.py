"""Alive and ready, told apart: alive while the process runs; ready while it can serve, and if not, why not."""

import asyncio
import time
from typing import Annotated, Any, Final

import msgspec
import nats.errors
import nats.js.errors
from litestar import Request, Response, get
from litestar.openapi import ResponseSpec
from litestar.params import QueryParameter

from controlplane import ids
from controlplane.bus import Bus
from controlplane.commands import EndRequests, Order
from controlplane.refusal import DISK_FULL, Refused
from controlplane.subjects import COMMAND_GATEWAY, STREAM
from web.gateway import Gateway
from web.plane_view import PlaneView

FRESH_S: Final = 0.5
"""Callers within this time share one look."""
FRESH_UNREADY_S: Final = 0.01
"""Likewise while it is not ready: whoever waits for it (`up`, a load balancer) is to see it at once."""
ANSWER_S: Final = 2.0
LAG_LIMIT: Final = 1000
"""Events behind the stream's end: at 10,000 events/s a tenth of a second."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    ready: bool
    reasons: tuple[str, ...]
    position: int
    lag_events: int | None
    """None: unknown, the bus doesn't say."""
    unseen: str = ""
    """That commands were carried out and nothing of it arrives here: callers are served, what is shown is old."""


class Health:
    def __init__(self, bus: Bus, view: PlaneView, gateway: Gateway) -> None:
        self._bus, self._view, self._gateway = bus, view, gateway
        self._last: State | None = None
        self._looked_at = 0.0
        self._looking = asyncio.Lock()

    async def state(self) -> State:
        """Ask the bus and the decider. Takes `ANSWER_S` seconds at most."""
        async with self._looking:
            age_s = time.monotonic() - self._looked_at
            fresh = self._last is not None and age_s < (FRESH_S if self._last.ready else FRESH_UNREADY_S)
            if self._last is None or not fresh or (self._last.ready and not self._view.synced):
                self._last = await self._look()
                self._looked_at = time.monotonic()
            return self._last

    async def _look(self) -> State:
        reasons: list[str] = []
        lag: int | None = None
        unseen = ""
        if self._gateway.stopping:
            reasons.append("this web process is stopping")
        if not self._bus.nc.is_connected:
            reasons.append("NATS does not answer")
        else:
            decider, lag, unseen = await asyncio.gather(self._decider(), self._lag(), self._unseen())
            if decider is not None:
                reasons.append(decider)
            if lag is None:
                reasons.append("the event stream does not answer")
            elif lag > LAG_LIMIT:
                reasons.append(f"the view is {lag} events behind, more than {LAG_LIMIT}")
            if not self._view.synced:
                reasons.append("events are not followed yet")
            if not self._gateway.opened.is_set():
                reasons.append("the decider has not admitted this gateway yet")
        return State(
            ready=not reasons, reasons=tuple(reasons), position=self._view.fleet.position, lag_events=lag, unseen=unseen
        )

    async def _decider(self) -> str | None:
        """None, or why nothing can be carried out. An empty batch of ends goes all the way through it and changes nothing."""
        order = Order(id=ids.new(ids.COMMAND), actor=self._gateway.actor, body=EndRequests(ends=()))
        try:
            await self._bus.command(COMMAND_GATEWAY, order, timeout_s=ANSWER_S)
        except Refused as refused:
            full = refused.details.get("reason") == DISK_FULL
            return refused.message if full else f"the decider does not answer: {refused.message}"
        return None

    async def _unseen(self) -> str:
        answered = self._bus.answered
        try:
            await self._view.wait_position(answered, ANSWER_S)
        except TimeoutError:
            at = self._view.fleet.position
            cure = "`enginehouse doctor` says whether its disk is full"
            return f"what is shown is of event {at}, and event {answered} was written since: NATS passes none on; {cure}"
        return ""

    async def _lag(self) -> int | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                stream = await self._bus.js.stream_info(STREAM)
        except (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError):
            return None
        return max(0, stream.state.last_seq - self._view.fleet.position)


@get(
    "/livez",
    summary="Whether the process runs",
    tags=["Health"],
    responses={200: ResponseSpec(dict[str, bool], False, "Alive")},
)
async def livez() -> Response[bytes]:
    return Response(b'{"alive":true}', media_type="application/json")


@get(
    "/readyz", summary="Whether it can serve, and if not why not", tags=["Health"],
    responses={200: ResponseSpec(State, False, "Ready"), 503: ResponseSpec(State, False, "Not ready")},
)  # fmt: skip
async def readyz(
    request: Request[Any, Any, Any],
    after: Annotated[
        int | None,
        QueryParameter(
            ge=0,
            le=2**62,
            description="Not before the event of this position is seen here; without it, not before the settings that the "
            "plane was started with have been applied and are seen here.",
        ),
    ] = None,
) -> Response[bytes]:
    services = request.app.state.services
    health: Health = services.health
    state = await health.state()
    position = services.view.fleet.position
    unseen = None
    if after is not None and position < after:
        unseen = f"the view is at event {position}, and not yet at {after}"
    elif after is None and services.plane.settings_due.exists():
        unseen = "the settings are being applied"
    if unseen is not None:
        state = msgspec.structs.replace(state, ready=False, reasons=(*state.reasons, unseen), position=position)
    headers = {} if state.ready else {"retry-after": "1"}
    body = msgspec.json.encode(state)
    return Response(body, status_code=200 if state.ready else 503, headers=headers, media_type="application/json")
