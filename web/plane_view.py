"""The fleet as this process sees it: the decider's state, then every event folded in order, and the latest beats.

A view, never a gate: decisions are the decider's. It outlives outages of NATS and the decider (it keeps the last state
and says that it lags) and starts again from the decider's state when the events in between can't be had any more.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from itertools import count
from typing import Final

import msgspec
import structlog
from nats.aio.msg import Msg

from controlplane.bus import Bus
from controlplane.envelope import Recorded
from controlplane.events import RequestCancelled, RequestFailed, RequestFinished
from controlplane.fleet import Fleet, Gap, Request, evolve
from controlplane.follower import Behind, follow
from controlplane.refusal import Refused
from controlplane.subjects import BEATS, NodeBeat

_log = structlog.get_logger(__name__)

RETRY_S: Final = 0.1
"""Between attempts: a restarted decider or NATS is back within a second or two."""
PLACES_S: Final = 0.5
"""Places in the queue are worked out at most this often, whoever asks: thousands may be waiting."""


_ENDINGS: Final = (RequestFinished, RequestFailed, RequestCancelled)
Ending = RequestFinished | RequestFailed | RequestCancelled


class Resynced(msgspec.Struct, frozen=True):
    """The view started again from the decider's state (or its connection changed); compare with what you knew."""

    fleet: Fleet


Change = Recorded | NodeBeat | Resynced
Listener = Callable[[Change], None]
"""Quick, synchronous, called in the event loop."""


class Watch:
    """What happens to one request, in order: its events, or after a restart of the view what the fleet holds of it.

    `on_end` is called at once when the request has ended: with the event, or None when the view missed it.
    """

    def __init__(self, request: str, on_end: Callable[[Ending | None], None]) -> None:
        self.request = request
        self.known = False
        """Whether the log has it: before it was accepted, a state without it says nothing."""
        self._on_end = on_end
        self._queue: asyncio.Queue[Recorded | Request] = asyncio.Queue()

    def put(self, item: Recorded | Request | None) -> None:
        if item is None:
            self._on_end(None)
        elif isinstance(item, Recorded) and isinstance(item.event, _ENDINGS):
            self._on_end(item.event)
        else:
            self._queue.put_nowait(item)

    async def next(self) -> Recorded | Request:
        return await self._queue.get()


class PlaneView:
    """Attributes: fleet (latest), beats (node -> its latest)."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.fleet = Fleet()
        self.beats: dict[str, NodeBeat] = {}
        self._following = self._loaded = False
        self._watches: dict[str, Watch] = {}
        self._listeners: set[Listener] = set()
        self._positions: list[tuple[int, int, asyncio.Future[None]]] = []
        self._tick = count()
        self._places: dict[str, int] = {}
        self._places_at = 0.0
        self._owed = (0, 0.0)

    @property
    def behind_s(self) -> float:
        """For how many seconds an event has been known to be written that has not come here; 0: all known ones have.

        Counted from the first look that finds it missing.
        """
        at = self.fleet.position
        if at >= self._owed[0]:
            self._owed = (self._bus.answered, time.monotonic())
        return time.monotonic() - self._owed[1] if at < self._owed[0] else 0.0

    @property
    def synced(self) -> bool:
        """Whether events are being followed; False: `fleet` is the last that was known."""
        return self._following and self._bus.nc.is_connected

    async def run(self) -> None:
        """Follow for ever."""
        said = ""
        beats = await self._bus.nc.subscribe(BEATS, cb=self._beat)
        try:
            while True:
                try:
                    await self._follow()
                except (Behind, Gap) as error:
                    _log.warning("view_restarts", reason=str(error), position=self.fleet.position)
                    self._loaded = False
                except Refused as refused:
                    if refused.message != said:
                        said = refused.message
                        _log.info("view_waits", reason=said, position=self.fleet.position)
                except Exception:
                    _log.exception("view_restarts", position=self.fleet.position)
                    self._loaded = False
                self._set_following(False)
                await asyncio.sleep(RETRY_S)
        finally:
            self._set_following(False)
            if not self._bus.nc.is_closed:
                await beats.unsubscribe()

    async def _follow(self) -> None:
        if not self._loaded:
            self.replace(await self._bus.state(timeout_s=5))
        self._set_following(True)
        async with aclosing(follow(self._bus, after=self.fleet.position)) as events:
            async for recorded in events:
                self.apply(recorded)
        raise Gap("the event feed ended")

    def replace(self, fleet: Fleet) -> None:
        """Start again from the decider's state; what happened in between was not seen event by event."""
        self.fleet, self._loaded = fleet, True
        for watch in tuple(self._watches.values()):
            known = fleet.requests.get(watch.request)
            if known is not None:
                watch.known = True
            if known is not None or watch.known:
                watch.put(known)
        self._settle_positions()
        self._tell(Resynced(fleet))

    def apply(self, recorded: Recorded) -> None:
        """Fold one event. One that was seen already is skipped; raises Gap when one is missing."""
        if recorded.position <= self.fleet.position:
            return
        self.fleet = evolve(self.fleet, recorded)
        request = getattr(recorded.event, "request", None)
        if request is not None and (watch := self._watches.get(request)) is not None:
            watch.known = True
            watch.put(recorded)
        if self._positions:
            self._settle_positions()
        self._tell(recorded)

    async def _beat(self, message: Msg) -> None:
        if not message.subject.startswith("beat.node."):
            return
        try:
            beat = msgspec.json.decode(message.data, type=NodeBeat)
        except msgspec.DecodeError as error:
            _log.warning("bad_beat", subject=message.subject, reason=str(error))
            return
        self.beats[beat.node] = beat
        self._tell(beat)

    def _set_following(self, following: bool) -> None:
        if self._following is not following:
            self._following = following
            self._tell(Resynced(self.fleet))

    def _tell(self, change: Change) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(change)
            except Exception:
                _log.exception("listener_failed")

    @contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Have `listener` called with every change from now on."""
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    @contextmanager
    def watching(self, request: str, on_end: Callable[[Ending | None], None]) -> Iterator[Watch]:
        """Collect the events of one request. Enter before the request is admitted, so that none is missed."""
        watch = self._watches[request] = Watch(request, on_end)
        try:
            yield watch
        finally:
            self._watches.pop(request, None)

    async def wait_position(self, position: int, deadline_s: float = 5.0) -> Fleet:
        """Return the fleet once it holds event `position`. Raises TimeoutError."""
        if self.fleet.position < position:
            reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._positions, (position, next(self._tick), reached))
            try:
                async with asyncio.timeout(deadline_s):
                    await reached
            finally:
                if not reached.done() or reached.cancelled():  # a position that never comes must not be remembered for ever
                    self._positions = [entry for entry in self._positions if entry[2] is not reached]
                    heapq.heapify(self._positions)
        return self.fleet

    def _settle_positions(self) -> None:
        while self._positions and self._positions[0][0] <= self.fleet.position:
            _, _, reached = heapq.heappop(self._positions)
            if not reached.done():
                reached.set_result(None)

    async def wait_for(self, predicate: Callable[[Fleet], bool], deadline_s: float) -> Fleet:
        """Return the first fleet of which `predicate` is true. Raises TimeoutError. For few waiters: asked at each event."""
        changed = asyncio.Event()
        with self.listening(lambda _: changed.set()):
            async with asyncio.timeout(deadline_s):
                while not predicate(self.fleet):
                    changed.clear()
                    await changed.wait()
        return self.fleet

    def place(self, request: str) -> int | None:
        """Place of a queued request, 1 = next; None when it isn't queued. Up to `PLACES_S` old."""
        now = time.monotonic()
        if now - self._places_at >= PLACES_S:
            queued = sorted((r.order, r.request) for r in self.fleet.requests.values() if r.instance is None)
            self._places = {name: place for place, (_, name) in enumerate(queued, start=1)}
            self._places_at = now
        return self._places.get(request)
