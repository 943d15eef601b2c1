"""A plant for worker tests: a real pool daemon, real holders, engines and frontends; the real decisions, without a bus.

The plane is a fleet in memory: commands are decided at once and the events go straight to the worker, as the relay would
send them.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from blake3 import blake3

from controlplane import ids
from controlplane.answer import Answer, answer
from controlplane.arguments import shaping
from controlplane.commands import (
    Admit,
    AnyCommand,
    DeviceFound,
    End,
    EndRequests,
    Hello,
    Load,
    OpenGateway,
    Order,
    RegisterModel,
)  # fmt: skip
from controlplane.decisions.decide import decide
from controlplane.envelope import Recorded
from controlplane.events import AnyEvent
from controlplane.fleet import Fleet, Instance, Model
from controlplane.plane import Plane, PlaneDevice
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from controlplane.spec import Idle, ModelFacts, ModelSpec
from pool.client import PoolClient
from tests.poolroom import forget
from worker import instancedir, preparedcopies, processes, skeleton
from worker.adoption import adopt
from worker.board import Board
from worker.caller import Caller
from worker.deadlines import Deadlines
from worker.desired import Desired
from worker.devicebooks import DeviceBooks
from worker.images.cabinet import Cabinet
from worker.images.roomwatch import RoomWatch
from worker.images.wishes import Wishes
from worker.instancedir import InstanceDir, Record
from worker.keeper import Keeper, left_over
from worker.life import found
from worker.locks import Locks
from worker.preparedcopies import PreparedCopies
from worker.processes import Process
from worker.reconcile import Reconciler
from worker.report import Reporter
from worker.shelf import ProgressCall, Shelf
from worker.site import Site
from worker.sources import Prepared
from worker.sources.fakes import fake_source
from worker.stock import Stock

ROOT = Path(__file__).parents[1]
DEVICE = "dev-0"
MIB = 1 << 20
QUICK = Deadlines(drain=1.0, abort=10.0, end_engine=1.0, pool=20.0)


class Workman:
    """One incarnation of the worker, as `life.Life` puts it together, but fed by hand."""

    def __init__(self, plant: "Plant") -> None:
        self.plant = plant
        self.desired = Desired(node="n1")
        self.sent: list[AnyCommand] = []
        board = Board()
        self.shelf = Shelf(plant.prepare, plant.plane.pool_socket)
        self.reporter = Reporter(self, "n1")
        self.stock = Stock(self.shelf, lambda: self.desired, self.reporter.report, board)
        self.locks = Locks.of(plant.plane)
        self.images = Cabinet.open(plant.data, "n1", self.reporter.report, quota_bytes=plant.image_quota_bytes)
        self.wishes = Wishes(self.images, lambda: self.desired)
        self.copies = PreparedCopies(
            plant.data, self.shelf, lambda: self.desired, lambda: preparedcopies.used(self.images.store, plant.data)
        )
        site = Site(
            images=self.images,
            plane=plant.plane,
            caller=plant.caller,
            locks=self.locks,
            stock=self.stock,
            board=board,
            deadlines=plant.deadlines,
            books=DeviceBooks(plant.plane, tuple, self.reporter.report),
        )
        self.room = RoomWatch(self.images, "n1", site.instances, lambda: self.desired, self.reporter.report)
        self.reconciler = Reconciler(site, self.reporter.report)
        self.site = site
        self.live = False

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer:
        """What the reporter sends goes to the plane."""
        self.sent.append(order.body)
        if self.plant.deaf:
            raise Refused(Code.UNAVAILABLE, "the decider is away")
        return self.plant.decide(order)

    async def begin(self) -> None:
        keepers = []
        for directory in instancedir.listing(self.site.instances):
            keeper = Keeper(self.site, directory.instance, self.reporter.report)
            await adopt(keeper.local)
            if left_over(keeper.local):
                await skeleton.clear(keeper.local)
            else:
                keepers.append(keeper)
        described = await self.shelf.described(deadline_s=30)
        assert described is not None
        hello = Hello(
            node="n1", address="127.0.0.1", incarnation=ids.new(ids.INCARNATION), boot=processes.boot_id(),
            pool_budget_bytes=described.budget_bytes,
            devices=tuple(DeviceFound(d.device, d.name, d.kind, d.size_bytes) for d in self.plant.plane.devices),
            instances=tuple(found(keeper.local) for keeper in keepers),
            weight_sets=tuple(known.weight_set for known in described.sets),
            images=self.images.found(), no_images=self.images.hindrance, image_quota_bytes=self.plant.image_quota_bytes,
            image_pins=self.plant.image_pins, checkpoint_bytes=self.plant.checkpoint_bytes,
        )  # fmt: skip
        self.plant.order(hello)
        self.images.begin()
        self.desired = Desired.of(self.plant.fleet, "n1")
        for keeper in keepers:
            self.reconciler.add(keeper)
        self.live = True
        self.act()

    def hear(self, recorded: Recorded) -> None:
        if self.live and (recorded.node == "n1" or recorded.event.AGGREGATE == "model"):
            self.desired = self.desired.after(recorded)
            self.act()

    def act(self) -> None:
        self.reconciler.follow(self.desired)
        self.stock.follow()
        self.wishes.follow()
        self.copies.follow()

    async def vanish(self) -> None:
        """As after kill -9: nothing is told, nothing is ended."""
        self.live = False
        await self.reconciler.close()
        await self.stock.close()
        await self.wishes.close()
        await self.copies.close()
        await self.reporter.close()


class Plant:
    """Everything of one node, and the plane's state."""

    def __init__(self, data: Path, session: aiohttp.ClientSession, caller: Caller, pool_bytes: int = 256 * MIB) -> None:
        self.data, self._session = data, session
        self.plane = Plane(
            data=str(data), postgres_url="", nats_url="", node_token="secret", pool_bytes=pool_bytes,
            pool_socket=str(data / "run" / "pool" / "pool.sock"),
            devices=(PlaneDevice(device=DEVICE, name="cpu0", kind="cpu", size_bytes=4096 * MIB),),
        )  # fmt: skip
        self.plane.write()
        self.fleet = Fleet()
        self.events: list[Recorded] = []
        self.deadlines = QUICK
        self.image_quota_bytes = 0
        self.image_pins: tuple[str, ...] = ()
        self.checkpoint_bytes: int | None = None
        self.deaf = False
        self.answers: dict[str, Answer] = {}
        self.prepare_gate: asyncio.Event | None = None
        self._news = asyncio.Event()
        self.caller = caller
        self.worker = Workman(self)
        self.pool: Process | None = None

    async def prepare(self, model: Model, progress: ProgressCall) -> Prepared:
        if self.prepare_gate is not None:
            await self.prepare_gate.wait()
        spec = model.spec
        size = int(spec.arguments.get("weight_bytes", MIB))
        source = fake_source(self.data, spec.source.removeprefix("fake:"), size)
        shape = msgspec.json.encode(sorted(shaping("fake", spec.arguments).items()))
        configuration = f"cfg_{blake3(shape).hexdigest(length=8)}"
        facts = ModelFacts(
            configuration=configuration, architecture="fake", weight_bytes=size,
            kv_bytes=int(spec.arguments.get("kv_bytes", 0)), context_tokens=4096,
        )  # fmt: skip
        return Prepared(source, facts)

    async def start_pool(self) -> None:
        run = self.data / "run" / "pool"
        (run / "segments").mkdir(mode=0o700, parents=True, exist_ok=True)
        argv = [sys.executable, "-P", "-m", "pool.daemon", "--socket", self.plane.pool_socket]
        argv += ["--directory", str(run / "segments"), "--budget", str(self.plane.pool_bytes)]
        self.pool = processes.spawn(argv, log=self.data / "pool.log", directory=ROOT)
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError, TimeoutError):
                    async with await PoolClient.connect(self.plane.pool_socket) as client:
                        await client.describe()
                        return
                await asyncio.sleep(0.02)

    async def restart_worker(self) -> None:
        await self.worker.vanish()
        self.worker = Workman(self)
        await self.worker.begin()

    def decide(self, order: Order) -> Answer:
        """One command, as the desk treats it: a repeated id gets its first answer."""
        if order.id in self.answers:
            return self.answers[order.id]
        decision = decide(self.fleet, order, time.time_ns() // 1_000_000)
        self.fleet = decision.fleet
        self.events += decision.events
        for recorded in decision.events:
            self.worker.hear(recorded)
        self._news.set()
        self.answers[order.id] = answer(decision.events)
        return self.answers[order.id]

    def order(self, body: AnyCommand, actor: str = "operator:test") -> Answer:
        return self.decide(Order(id=ids.new(ids.COMMAND), actor=actor, body=body))

    async def until(self, right: Callable[[], Any], deadline_s: float = 40) -> Any:
        """Wait until `right()` is true, looked at after every event and every 20 ms."""
        try:
            async with asyncio.timeout(deadline_s):
                while not (result := right()):
                    self._news.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), 0.02)
                return result
        except TimeoutError:
            raise AssertionError(f"did not come: {[(e.type, e.event) for e in self.events[-6:]]}") from None

    async def register(self, name: str, *, cells: int = 4, idle: Idle | None = None, **arguments: Any) -> None:
        """A fake model, inspected."""
        spec = ModelSpec(
            name=name, source=f"fake:{name}", engine="fake", arguments={"weight_bytes": 4 * MIB} | arguments, cells=cells,
            idle=idle or Idle(),
        )  # fmt: skip
        self.order(RegisterModel(spec=spec))
        await self.until(lambda: self.fleet.models[name].facts)

    async def load(self, name: str) -> Instance:
        self.order(Load(model=name))
        return await self.until(lambda: self.up(name))

    def up(self, name: str) -> Instance | None:
        return next(
            (i for i in self.fleet.instances.values() if i.model == name and i.rung is Rung.UP and i.directive_settled), None
        )

    def only(self) -> Instance | None:
        return next(iter(self.fleet.instances.values()), None)

    def of_type(self, kind: type[AnyEvent]) -> list[Any]:
        return [recorded.event for recorded in self.events if isinstance(recorded.event, kind)]

    def directory(self, instance: str) -> InstanceDir:
        return InstanceDir(self.data / "run" / "inst", instance)

    def record(self, instance: str) -> Record:
        record = self.directory(instance).read()
        assert record is not None
        return record

    def admit(self, model: str) -> tuple[str, Answer]:
        """A caller's request through a gateway."""
        if not self.fleet.gateways:
            self.order(OpenGateway(gateway="gw_1", host="h", pid=1))
        request = ids.new(ids.REQUEST)
        admit = Admit(request=request, model=model, gateway="gw_1", kind="completion", streamed=True, prompt_bytes=3)
        return request, self.order(admit, "gateway:gw_1")

    def end(self, request: str) -> None:
        self.order(EndRequests(ends=(End(request=request, outcome="finished", finish_reason="stop"),)), "gateway:gw_1")

    async def generate(self, instance: Instance, request: str, prompt: str, **body: Any) -> list[dict[str, Any]]:
        """Ask an instance's frontend; return all lines."""
        return [line async for line in self.stream(instance, request, prompt, **body)]

    async def stream(self, instance: Instance, request: str, prompt: str, **body: Any) -> AsyncIterator[dict[str, Any]]:
        wish = {
            "request": request, "attempt": 1, "model": instance.model, "grant": instance.grant, "kind": "completion",
            "body": {"model": instance.model, "prompt": prompt, "max_tokens": 64, **body},
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {self.plane.node_token}"}
        async with self._session.post(f"{instance.endpoint}/generate", json=wish, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                yield msgspec.json.decode(line)

    def processes(self) -> list[int]:
        """Pids of all that belongs to this data directory, the pool apart."""
        found_ = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if str(self.data).encode() in (entry / "cmdline").read_bytes() and (
                        self.pool is None or int(entry.name) != self.pool.pid
                    ):
                        found_.append(int(entry.name))
        return found_


def show_failures(log: Path) -> None:
    """What the daemon failed at, with its traceback, for the output of a test that fails."""
    for line in log.read_text().splitlines() if log.exists() else ():
        if "conversation_failed" in line or "Traceback" in line:
            print(line)


@contextlib.asynccontextmanager
async def plant(**options: Any) -> AsyncIterator[Plant]:
    """A running plant; afterwards nothing of it is left."""
    data = Path(tempfile.mkdtemp(prefix="eh"))
    async with aiohttp.ClientSession() as session, Caller() as caller:
        made = Plant(data, session, caller, **options)
        try:
            await made.start_pool()
            await made.worker.begin()
            yield made
        finally:
            await made.worker.vanish()
            for pid in made.processes():
                if process := processes.identify(pid):
                    processes.send(process, signal.SIGKILL)
                    await processes.gone(process, 5)
            if made.pool is not None:
                await processes.end(made.pool, grace_s=10)
            show_failures(data / "pool.log")
            forget(data / "run" / "pool" / "segments")
            shutil.rmtree(data, ignore_errors=True)
