"""One worker's life: take up what an earlier one left, say hello, follow what the plane wants, act.

Hello comes before the plane's state is asked for, so that the state already knows what was found and what is lost.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import structlog
from nats.aio.msg import Msg

from controlplane import ids, subjects
from controlplane.bus import Bus, give_pulse
from controlplane.commands import DeviceFound, Hello, InstanceFound, Order
from controlplane.follower import Behind, follow
from controlplane.plane import Plane
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from controlplane.subjects import Measure, Measured
from pool.described import Described
from worker import instancedir, processes, skeleton
from worker.adoption import adopt
from worker.beats import Beats
from worker.board import Board
from worker.caller import Caller
from worker.cuda import able
from worker.deadlines import Deadlines
from worker.desired import Desired
from worker.devicebooks import DeviceBooks
from worker.engines.messages import State
from worker.failure import StepFailed
from worker.frontend.chat import count_tokens
from worker.frontend.request import Invalid
from worker.images.cabinet import Cabinet
from worker.images.orders import answer_about_images
from worker.images.roomwatch import RoomWatch
from worker.images.wishes import Wishes
from worker.instancedir import Record
from worker.keeper import Keeper, left_over
from worker.local import LocalInstance
from worker.locks import Locks
from worker.moves import EngineState
from worker.preparedcopies import PreparedCopies, used
from worker.reconcile import Reconciler
from worker.report import Reporter
from worker.shelf import Prepare, Shelf
from worker.site import Site
from worker.spare import Spare
from worker.stock import Stock
from worker.versions import release

POOL_S: Final = 20.0
"""The pool daemon is started beside us. Without it no weight set is known, and hello would say that all are lost."""
RETRY_S: Final = 0.2

T = TypeVar("T")
log = structlog.get_logger("worker")


class Life:
    """One worker, from its hello to its end."""

    def __init__(self, plane: Plane, bus: Bus, caller: Caller, prepare: Prepare, deadlines: Deadlines) -> None:
        self._plane, self._bus = plane, bus
        self.desired = Desired(node=plane.node)
        board = Board()
        self._shelf = Shelf(prepare, plane.pool_socket)
        self._reporter = Reporter(bus, plane.node)
        self._stock = Stock(self._shelf, lambda: self.desired, self._reporter.report, board)
        locks = Locks.of(plane)
        self._images = Cabinet.open(Path(plane.data), plane.node, self._reporter.report, plane.criu, plane.image_quota_bytes)
        self._wishes = Wishes(self._images, lambda: self.desired)
        self._copies = PreparedCopies(
            Path(plane.data), self._shelf, lambda: self.desired, lambda: used(self._images.store, Path(plane.data))
        )
        self._spare = Spare(Path(plane.data))
        self._site = Site(
            plane=plane, caller=caller, locks=locks, stock=self._stock, board=board, images=self._images, deadlines=deadlines,
            books=DeviceBooks(plane, self._engines, self._reporter.report), spare=self._spare,
        )  # fmt: skip
        self._room = RoomWatch(self._images, plane.node, self._site.instances, lambda: self.desired, self._reporter.report)
        self.reconciler = Reconciler(self._site, self._reporter.report)
        self._incarnation = ids.new(ids.INCARNATION)
        self._measurements: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take up, say hello, follow; until cancelled."""
        await self._bus.nc.subscribe(subjects.pulse(self._plane.node), cb=give_pulse)
        keepers = await self._adopt()
        beats = Beats(self._site, self._bus, self.reconciler, self._shelf, self._incarnation)
        await self._hello(keepers)
        self.desired = Desired.of(await _insist(self._bus.state), self._plane.node)
        for keeper in keepers:
            self.reconciler.add(keeper)
        self._act()
        await self._bus.nc.subscribe(subjects.measure(self._plane.node), cb=self._measure)
        await self._bus.nc.subscribe(subjects.images_of(self._plane.node), cb=self._images_asked)
        beside = [
            asyncio.create_task(beats.run(), name="beats"), asyncio.create_task(self._room.run(), name="images:room"),
            asyncio.create_task(self._spare.run(), name="spare"),
        ]  # fmt: skip
        try:
            await self._follow()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await self.close()

    async def close(self) -> None:
        await self.reconciler.close()
        await self._stock.close()
        await self._wishes.close()
        await self._copies.close()
        await self._reporter.close()

    def _engines(self) -> Iterator[tuple[Record, State | None]]:
        for keeper in self.reconciler.keepers.values():
            if (record := keeper.local.directory.read()) is not None:
                yield record, keeper.local.engine_state

    async def _adopt(self) -> list[Keeper]:
        """Look at every instance directory; what can't be kept is cleared now, so that hello may call it gone."""
        kept: list[Keeper] = []
        for directory in instancedir.listing(self._site.instances):
            keeper = Keeper(self._site, directory.instance, self._reporter.report)
            await adopt(keeper.local)
            if left_over(keeper.local):
                try:
                    await skeleton.clear(keeper.local)
                except StepFailed as failure:  # its keeper goes on trying, and says that it is gone only when it is
                    log.error("not_cleared", instance=directory.instance, code=failure.code, message=failure.message)
                    kept.append(keeper)
                else:
                    log.info("cleared", instance=directory.instance)
            else:
                kept.append(keeper)
                log.info("adopted", instance=directory.instance, seen=msgspec.to_builtins(keeper.local.seen))
        return kept

    async def _hello(self, keepers: list[Keeper]) -> None:
        plane = self._plane
        pool = await self._pool()
        limits = await asyncio.to_thread(Plane.read, Path(plane.data))  # they may have changed since this process began
        hello = Hello(
            node=plane.node, address=plane.node_address, incarnation=self._incarnation, boot=processes.boot_id(),
            pool_budget_bytes=pool.budget_bytes if pool else plane.pool_bytes,
            devices=tuple(DeviceFound(d.device, d.name, d.kind, d.size_bytes, d.island) for d in plane.devices),
            instances=tuple(found(keeper.local) for keeper in keepers),
            weight_sets=tuple(known.weight_set for known in pool.sets) if pool else (),
            images=await asyncio.to_thread(self._images.found), no_images=self._images.hindrance,
            no_checkpoint=await asyncio.to_thread(able.hindrance),
            image_quota_bytes=limits.image_quota_bytes, image_pins=limits.image_pins, checkpoint_bytes=limits.checkpoint_bytes,
            version=release("enginehouse"),
        )  # fmt: skip
        order = Order(id=ids.new(ids.COMMAND), actor=f"node:{plane.node}", body=hello)
        answer = await _insist(lambda: self._bus.command(subjects.command_node(plane.node), order))
        self._images.begin()
        log.info("hello", incarnation=self._incarnation, position=getattr(answer, "position", 0))

    async def _pool(self) -> Described | None:
        ends = time.monotonic() + POOL_S
        while True:
            if (described := await self._shelf.described()) is not None or time.monotonic() > ends:
                return described
            await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        while not self._bus.closed.is_set():
            try:
                filters = subjects.events_for_node(self._plane.node)
                async for recorded in follow(self._bus, after=self.desired.position, filters=filters):
                    self.desired = self.desired.after(recorded)
                    self._act()
            except Behind as behind:
                log.warning("behind", after=behind.after, first=behind.first)
                self.desired = Desired.of(await _insist(self._bus.state), self._plane.node)
                self._act()

    def _act(self) -> None:
        self.reconciler.follow(self.desired)
        self._stock.follow()
        self._wishes.follow()
        self._copies.follow()

    async def _images_asked(self, message: Msg) -> None:
        task = asyncio.create_task(answer_about_images(self._images, message))
        self._measurements.add(task)
        task.add_done_callback(self._measurements.discard)

    async def _measure(self, message: Msg) -> None:
        task = asyncio.create_task(self._measured(message))
        self._measurements.add(task)
        task.add_done_callback(self._measurements.discard)

    async def _measured(self, message: Msg) -> None:
        try:
            asked = msgspec.json.decode(message.data, type=Measure)
            shelved = await self._stock.find(asked.model)
            body = msgspec.json.decode(asked.body, type=dict[str, object])
            count = partial(count_tokens, shelved.source, asked.kind, body, most=shelved.facts.context_tokens - 1)
            answer = Measured(prompt_tokens=await asyncio.to_thread(count))
        except Invalid as invalid:
            answer = Measured(error=invalid.message, code=invalid.code)
        except (StepFailed, ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.info("not_measured", reason=repr(error))  # no fault of the caller's: whoever serves the prompt counts anyway
            answer = Measured()
        await message.respond(msgspec.json.encode(answer))


async def _insist(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask the decider until it answers. Raises Refused for any other reason than its absence."""
    while True:
        try:
            return await ask()
        except Refused as refused:
            if refused.code is not Code.UNAVAILABLE:
                raise
            await asyncio.sleep(RETRY_S)


def found(local: LocalInstance) -> InstanceFound:
    """An adopted instance, as it really is."""
    seen, rung = local.seen, Rung.COLD
    if seen.engine is EngineState.CHECKPOINTED:
        rung = Rung.CHECKPOINT
    if seen.engine is EngineState.CONNECTED:
        rung = Rung.UP if seen.awake and seen.serving is not None else Rung.SLEEP
    model = seen.serving.model if seen.serving else (seen.woken_for.model if seen.woken_for else None)
    return InstanceFound(local.instance, rung, model, seen.grant)
