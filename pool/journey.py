"""The bytes of one fill on their way: over the device's own link, and through devices that help."""

import contextlib
import errno
import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pool.gpu import Block, Gpu, NoDeviceMemory
from pool.messages import Shard
from pool.pace import FREE, Pace
from pool.paths import PIECE_BYTES, RING_BUFFERS, Dealer, pieces
from pool.slabs import Slab
from pool.topology import LINK_BYTES_PER_S

STALL_S = 20.0
"""A helper sends a piece a millisecond. One that has sent none for so long hangs in its driver."""
log = logging.getLogger("pool")


class InFlight(OSError):
    """A copy can't be waited for: it may still arrive, so where it goes to must stay."""


@dataclass(frozen=True)
class Cargo:
    """One piece: from host memory into a block."""

    block: Block
    offset: int
    address: int
    size: int


@dataclass(frozen=True)
class Route:
    helper: Gpu | None
    """None: the device's own link."""
    share: float
    bytes_per_s: float = LINK_BYTES_PER_S
    """Of its link, one way."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set once the helper's link is needed for the helper itself: what it has not sent by then goes by the direct link."""


class Helper:
    """A thread that sends what it is given through a ring of its device, for one fill.

    The device's lane is not in the way: a wake of its own begins at once, and shares the link.
    """

    def __init__(self, gpu: Gpu, stop: threading.Event) -> None:
        self.device = gpu.uuid
        self._gpu, self._stop = gpu, stop
        self._cargo: queue.SimpleQueue[Cargo | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[Cargo] = queue.SimpleQueue()
        self._sent = 0
        self._seconds = 0.0
        self._roomless = False
        self._stuck = False
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"pool-helper-{gpu.uuid}", daemon=True)
        self._thread.start()

    def give(self, cargo: Cargo) -> None:
        self._cargo.put(cargo)

    def end(self) -> list[Cargo]:
        """No more is given: wait for all of it. What was not sent, for want of memory for the ring or for a stop, comes back.
        Its ring goes a moment later: giving memory back takes a millisecond, and nobody need wait for it.

        Raises OSError when a copy failed, and nothing is in flight then either; InFlight when nothing has moved for `STALL_S`.
        Twice is fine, and the second time nobody waits for one that hangs.
        """
        self._cargo.put(None)
        moved = self._sent
        while not self._over.wait(0 if self._stuck else STALL_S):
            if self._stuck or self._sent == moved:
                self._stuck = True
                raise InFlight(errno.ETIMEDOUT, f"{self.device} has sent nothing for {STALL_S:g} s, {moved} bytes before that")
            moved = self._sent
        if self._error is not None:
            raise self._error
        return list(self.returned())

    def stop(self) -> None:
        """It begins no other piece."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """It sends no more: what it is given comes back."""
        return self._roomless or self._stop.is_set()

    def returned(self) -> Iterator[Cargo]:
        """What came back so far, each piece once."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._back.get_nowait()

    def not_begun(self) -> Cargo | None:
        """A piece that it has not begun, not its own any more."""
        with contextlib.suppress(queue.Empty):
            return self._cargo.get_nowait()
        return None

    @property
    def shard(self) -> Shard:
        """What it did, after `end`."""
        return Shard(via=self.device, copied_bytes=self._sent, took_ms=self._seconds * 1000)

    def _work(self) -> None:
        try:
            self._relay()
        finally:
            self._over.set()

    def _relay(self) -> None:
        begun = time.monotonic()
        try:
            relay = self._gpu.relay(RING_BUFFERS, PIECE_BYTES)
        except NoDeviceMemory:  # somebody took it since the plan was made
            self._roomless = True
            for cargo in iter(self._cargo.get, None):
                self._back.put(cargo)
            return
        except BaseException as error:
            self._error = error
            return
        try:
            for cargo in iter(self._cargo.get, None):
                if self._stop.is_set():
                    self._back.put(cargo)
                    continue
                relay.send(cargo.block, cargo.offset, cargo.address, cargo.size)
                self._sent += cargo.size
        except BaseException as error:
            self._error = error
        try:
            relay.wait()  # nothing may be in flight into memory that goes
        except BaseException as error:
            self._error = self._error or error
        self._seconds = time.monotonic() - begun
        self._over.set()
        try:
            relay.close()
        except OSError as error:
            log.warning("ring_kept", extra={"device": self.device, "why": str(error)})


class Journey:
    """Of one fill. Called by the device's lane."""

    def __init__(self, gpu: Gpu, routes: Sequence[Route], pace: Pace = FREE) -> None:
        """pace: of the device's own link."""
        self.gpu, self._pace = gpu, pace
        self._helpers: list[Helper] = []
        try:
            for route in routes:
                if route.helper is not None:
                    self._helpers.append(Helper(route.helper, route.stop))
        except RuntimeError:  # no more threads: those that have begun would wait for ever, with their rings
            self.abandon()
            raise
        self._dealer = Dealer([route.share for route in routes] or [1.0])
        self.writers = tuple(helper.device for helper in self._helpers)
        self.bytes_per_s = routes[0].bytes_per_s / routes[0].share if routes else LINK_BYTES_PER_S
        """Over all of them."""

    def send(self, block: Block, at: int, part: Slab) -> None:
        """Queue a segment whose place is `at` bytes into a block. Raises OSError."""
        self._take_over()
        for offset, size in pieces(part.size):
            number = self._dealer.deal(size)
            if number:
                self._helpers[number - 1].give(Cargo(block, at + offset, part.address + offset, size))
            else:
                self._pace.hold(size)
                self.gpu.copy(block, at + offset, part.address + offset, size)

    def _take_over(self) -> None:
        """A helper that has stopped is given no more, and what it has left goes by the direct link at once.

        Otherwise that link stands still for half of the time that memory for the rest takes to be made.
        """
        for number, helper in enumerate(self._helpers, 1):
            if helper.stopped:
                self._dealer.leave_out(number)
                self._direct(number, helper.returned())

    def _direct(self, number: int, left: Iterable[Cargo]) -> None:
        for cargo in left:
            self._pace.hold(cargo.size)
            self.gpu.copy(cargo.block, cargo.offset, cargo.address, cargo.size)
            self._dealer.take_over(number, cargo.size)

    def arrive(self, begun: float) -> tuple[Shard, ...]:
        """Wait for all of it; what each link has done since `begun` (monotonic seconds). Raises OSError."""
        self._take_over()
        self.gpu.wait()
        while self._even_out():
            self.gpu.wait()
        seconds = time.monotonic() - begun
        own = self._dealer.dealt[0]
        for number, helper in enumerate(self._helpers, 1):
            self._direct(number, helper.end())
        if self._dealer.dealt[0] > own:
            self.gpu.wait()
            seconds = time.monotonic() - begun
        direct = Shard(via=self.gpu.uuid, copied_bytes=self._dealer.dealt[0], took_ms=seconds * 1000)
        return (direct, *[helper.shard for helper in self._helpers if helper.shard.copied_bytes])

    def _even_out(self) -> bool:
        """The direct link is done: it takes over a piece of each helper that has some left. A ring takes a while to be made."""
        taken = [(number, cargo) for number, helper in enumerate(self._helpers, 1) if (cargo := helper.not_begun()) is not None]
        for number, cargo in taken:
            self._direct(number, (cargo,))
        return bool(taken)

    def abandon(self) -> None:
        """Nothing is in flight when this returns, whatever a helper has met: what is on its way arrives, the rest is not sent.

        Raises InFlight for a helper that hangs, OSError for the device itself.
        """
        for helper in self._helpers:
            helper.stop()
        hangs: InFlight | None = None
        for helper in self._helpers:
            try:
                helper.end()
            except InFlight as error:
                hangs = error
            except Exception as error:
                log.info("abandoned", extra={"device": helper.device, "why": repr(error)})  # it has failed, and that is why
        try:
            self.gpu.wait()
        finally:
            if hangs is not None:
                raise hangs
