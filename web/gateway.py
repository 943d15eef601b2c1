"""This web process as a gateway: it announces itself, beats, admits requests for its callers and ends each of them once."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Final, Protocol

import structlog

from controlplane import ids
from controlplane.answer import Answer
from controlplane.bus import Bus
from controlplane.commands import Admit, AnyCommand, CloseGateway, End, Interrupt, OpenGateway, Order
from controlplane.refusal import Code, Refused
from controlplane.subjects import COMMAND_GATEWAY, GatewayBeat, beat_gateway
from web.ends import Ends
from web.errors import ApiError
from web.frontend import Frontends
from web.plane_view import PlaneView

_log = structlog.get_logger(__name__)

BEAT_S: Final = 1.0
ADMIT_S: Final = 4.0
"""An admission is one commit; a caller is better off with 503 and Retry-After than with a longer silence."""
OPEN_S: Final = 1.0
"""A caller waits so long for a gateway that is just opening (again)."""
RETRY_S: Final = 0.2
INTERRUPT_S: Final = 30.0
"""How long a request that lost its instance waits for a decider before its caller gets an error."""
ORPHAN_MS: Final = 5000
"""A request of ours that nobody here holds, this long after its acceptance, has lost its caller (an admission whose
answer came too late); it is ended."""


class Held(Protocol):
    """A request with a caller behind it."""

    request: str

    def stop(self, error: ApiError) -> None:
        """The process is about to stop: tell the caller, and be quick."""
        ...


class Gateway:
    """Attributes: gateway (its id; a new one after the plane took it for dead), ends, frontends, view."""

    def __init__(self, bus: Bus, view: PlaneView, frontends: Frontends) -> None:
        self.bus, self.view, self.frontends = bus, view, frontends
        self.gateway = ids.new(ids.GATEWAY)
        self.ends = Ends(bus, self.actor)
        self.opened = asyncio.Event()
        self.stopping = self._closed = False
        self._released = asyncio.Event()
        self._opened_at = 0
        self._held: dict[str, Held] = {}
        self._loose: dict[asyncio.Future[None], str] = {}
        self._opening = asyncio.Lock()

    @property
    def actor(self) -> str:
        return f"gateway:{self.gateway}"

    async def run(self) -> None:
        """Open, then beat and sweep for ever. The ends are sent beside it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.ends.run())
            group.create_task(self._beat())
            while True:
                await self._open()
                while self._known():
                    self._sweep()
                    await asyncio.sleep(BEAT_S)
                _log.warning("gateway_was_closed", gateway=self.gateway)
                self.opened.clear()  # the next one gets a new id: a closed gateway's stream has ended

    async def _beat(self) -> None:
        while True:
            await self.bus.publish(beat_gateway(self.gateway), GatewayBeat(gateway=self.gateway, at_ms=_now_ms()))
            await asyncio.sleep(BEAT_S)

    async def _open(self) -> None:
        async with self._opening:
            if self.opened.is_set():
                return
            fresh = ids.new(ids.GATEWAY) if self._opened_at else self.gateway
            order = self._order(OpenGateway(gateway=fresh, host=socket.gethostname(), pid=os.getpid()))
            answered = await self._insist(order, None)
            self._opened_at = max(answered.position, 1)
            self.gateway = fresh
            self.ends.actor = self.actor
            self.opened.set()

    def _known(self) -> bool:
        """False once the plane has closed this gateway although it lives (it had been cut off for too long)."""
        fleet = self.view.fleet
        return self.stopping or not self.view.synced or fleet.position < self._opened_at or self.gateway in fleet.gateways

    def _sweep(self) -> None:
        limit = _now_ms() - ORPHAN_MS
        for request in self.view.fleet.requests.values():
            if request.gateway != self.gateway or request.accepted_ms > limit or request.request in self._held:
                continue
            if request.request not in self._loose.values() and not self.ends.holds(request.request):
                _log.warning("orphan_ended", request=request.request)
                self.ends.add(End(request=request.request, outcome="cancelled", by="gateway", code="orphan"))

    async def admit(self, make: Callable[[str], Admit]) -> Answer:
        """Ask for a place for a request; `make` is given the gateway's id. Raises Refused.

        After Refused(UNAVAILABLE) the request may have been accepted: end it.
        """
        if not self.opened.is_set():
            await self._until_open()
        asked = self.gateway
        try:
            return await self.bus.command(COMMAND_GATEWAY, self._order(make(asked)), timeout_s=ADMIT_S)
        except Refused as refused:
            if refused.code is not Code.GATEWAY_UNKNOWN:
                raise
        if self.gateway == asked:  # nobody else has opened it again meanwhile
            self.opened.clear()
        try:
            async with asyncio.timeout(ADMIT_S):
                await self._open()
        except TimeoutError:
            raise _not_open() from None
        return await self.bus.command(COMMAND_GATEWAY, self._order(make(self.gateway)), timeout_s=ADMIT_S)

    async def _until_open(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S if self.bus.nc.is_connected else 0):
                await self.opened.wait()
                return
        raise _not_open()

    async def interrupt(self, lost: Interrupt) -> Answer:
        """Say that a running request lost its instance; insists for `INTERRUPT_S`. Raises Refused."""
        return await self._insist(self._order(lost), INTERRUPT_S)

    async def _insist(self, order: Order, limit_s: float | None) -> Answer:
        started = time.monotonic()
        while True:
            try:
                return await self.bus.command(COMMAND_GATEWAY, order, timeout_s=ADMIT_S)
            except Refused as refused:
                if refused.code is not Code.UNAVAILABLE:
                    raise
                if limit_s is not None and time.monotonic() - started > limit_s:
                    raise
            await asyncio.sleep(RETRY_S)

    def _order(self, body: AnyCommand) -> Order:
        return Order(id=ids.new(ids.COMMAND), actor=self.actor, body=body)

    @contextlib.contextmanager
    def holding(self, held: Held) -> Iterator[None]:
        """Register a request as having a caller."""
        if self.stopping:
            raise stopping()
        self._held[held.request] = held
        try:
            yield
        finally:
            self._held.pop(held.request, None)
            if not self._held:
                self._released.set()

    @property
    def held(self) -> int:
        return len(self._held)

    def spawn(self, request: str, work: Coroutine[object, object, None]) -> None:
        """Run what must outlive the request's caller: an abort in an engine, with its end behind that."""
        task = asyncio.ensure_future(work)
        self._loose[task] = request
        task.add_done_callback(self._loose.pop)

    async def close(self, deadline_s: float = 1.2) -> None:
        """Stop the open streams, end their requests, close the gateway; the plane ends whatever is left by itself."""
        if self._closed:
            return
        self.stopping = self._closed = True
        until = time.monotonic() + deadline_s
        if self._held:
            self._released.clear()
        else:
            self._released.set()
        for held in tuple(self._held.values()):
            held.stop(stopping())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s / 2):
                await self._released.wait()
                await asyncio.gather(*self._loose, return_exceptions=True)
        await self.ends.flush(max(0.1, until - deadline_s / 4 - time.monotonic()))
        if self.opened.is_set():
            try:
                order = self._order(CloseGateway(gateway=self.gateway, code="stopped"))
                await self.bus.command(COMMAND_GATEWAY, order, timeout_s=max(0.1, until - time.monotonic()))
            except Refused as refused:
                _log.warning("gateway_not_closed", gateway=self.gateway, reason=refused.message)


def stopping() -> ApiError:
    return ApiError(503, "unavailable", "this web process is stopping; try again", retry_after_ms=1000)


def _not_open() -> Refused:
    return Refused(Code.UNAVAILABLE, "this gateway is not admitted by the decider yet; try again", retry_after_ms=1000)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
