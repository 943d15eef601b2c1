"""A node by script: follows the plane's events and reports, as a worker does, with a scripted frontend for each instance."""

import asyncio
import contextlib
from collections.abc import Coroutine

import msgspec
from nats.aio.msg import Msg

from controlplane import ids
from controlplane.bus import Bus
from controlplane.commands import (
    AnyCommand,
    DeviceFound,
    Hello,
    Order,
    ReportEnded,
    ReportFailed,
    ReportModel,
    ReportSlept,
    ReportStaged,
    ReportUp,
)
from controlplane.envelope import Recorded
from controlplane.events import InstanceDirected, ModelRegistered
from controlplane.follower import follow
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from controlplane.spec import ModelFacts
from controlplane.subjects import Measure, Measured, NodeBeat, Progress, beat_node, command_node, measure
from tests.integration.web.scripted_frontend import Script, ScriptedFrontend

NODE = "n1"
DEVICE_BYTES = 8 << 20
MODEL_BYTES = 5 << 20


class ScriptedNode:
    """Attributes: script (of every frontend), frontends by instance, measured (tokens of any prompt), climb (a gate)."""

    def __init__(self, bus: Bus, devices: int = 1) -> None:
        self._bus = bus
        self._devices = devices
        self.script = Script()
        self.frontends: dict[str, ScriptedFrontend] = {}
        self.measured: int | None = 5
        self.measures = 0
        self.climb = asyncio.Event()
        self.climb.set()
        self.directed: list[InstanceDirected] = []
        self.fail_climbs = 0
        self.progress: tuple[Progress, ...] = ()
        self._numbers: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.incarnation = ids.new(ids.INCARNATION)

    async def start(self) -> None:
        devices = tuple(DeviceFound(f"dev{n}", f"cpu{n}", "cpu", DEVICE_BYTES) for n in range(self._devices))
        hello = Hello(
            node=NODE, address="127.0.0.1", incarnation=self.incarnation, boot="b", pool_budget_bytes=1 << 30, devices=devices
        )
        await self.report(hello)
        await self._bus.nc.subscribe(measure(NODE), cb=self._measure)
        self._task(self._beat())
        self._task(self._follow())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for frontend in self.frontends.values():
            await frontend.stop()

    @property
    def frontend(self) -> ScriptedFrontend:
        """The only instance's."""
        (frontend,) = self.frontends.values()
        return frontend

    async def report(self, body: AnyCommand) -> None:
        order = Order(id=ids.new(ids.COMMAND), actor=f"node:{NODE}", body=body)
        while True:
            try:
                await self._bus.command(command_node(NODE), order)
            except Refused as refused:
                if refused.code is not Code.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)
            else:
                return

    async def fail(self, instance: str) -> None:
        """Say that the instance's engine died."""
        await self.report(
            ReportFailed(
                node=NODE, instance=instance, directive=self._numbers[instance],
                rung=Rung.UP, step="serve", code="engine_died", message="killed",
            )
        )  # fmt: skip

    def _task(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    async def _measure(self, message: Msg) -> None:
        msgspec.json.decode(message.data, type=Measure)
        self.measures += 1
        await message.respond(msgspec.json.encode(Measured(prompt_tokens=self.measured)))

    async def _beat(self) -> None:
        while True:
            beat = NodeBeat(
                node=NODE, incarnation=self.incarnation, at_ms=0, pool_used_bytes=1, pool_budget_bytes=2, pool_ok=True,
                device_bytes={"dev0": 3}, progress=self.progress,
            )  # fmt: skip
            await self._bus.publish(beat_node(NODE), beat)
            await asyncio.sleep(0.5)

    async def _follow(self) -> None:
        async for recorded in follow(self._bus, after=0):
            match recorded.event:
                case ModelRegistered(model=model, revision=revision):
                    await self._inspect(model, revision)
                case InstanceDirected():
                    self._task(self._obey(recorded, recorded.event))
                case _:
                    pass

    async def _inspect(self, model: str, revision: int) -> None:
        facts = ModelFacts(
            configuration="cfg_1", architecture="fake", weight_bytes=1 << 20, kv_bytes=MODEL_BYTES - (1 << 20),
            context_tokens=2048, template_bytes=64,
        )  # fmt: skip
        await self.report(ReportModel(node=NODE, model=model, revision=revision, facts=facts, engine="fake", arguments={}))

    async def _obey(self, recorded: Recorded, event: InstanceDirected) -> None:
        self.directed.append(event)
        self._numbers[event.instance] = recorded.position
        with contextlib.suppress(Refused):  # superseded meanwhile
            match event.rung:
                case Rung.UP:
                    await self._up(recorded.position, event)
                case Rung.SLEEP:
                    slept = ReportSlept(
                        node=NODE, instance=event.instance, directive=recorded.position, pid=1, took_ms=1, bytes_used=1 << 20
                    )
                    await self.report(slept)
                case _:
                    await self.frontends.pop(event.instance, ScriptedFrontend()).stop()
                    await self.report(ReportEnded(node=NODE, instance=event.instance, directive=recorded.position, took_ms=1))

    async def _up(self, number: int, event: InstanceDirected) -> None:
        await self.climb.wait()
        if self.fail_climbs:
            self.fail_climbs -= 1
            failed = ReportFailed(
                node=NODE, instance=event.instance, directive=number, rung=Rung.COLD, step="start", code="start_failed",
                message="x",
            )  # fmt: skip
            await self.report(failed)
            return
        if event.instance not in self.frontends:
            self.frontends[event.instance] = ScriptedFrontend(self.script)
            await self.frontends[event.instance].start()
        assert event.model is not None
        assert event.grant is not None
        staged = ReportStaged(
            node=NODE, model=event.model, revision=event.revision, weight_set=f"ws_{event.model}", size_bytes=1 << 20,
            took_ms=1,
        )  # fmt: skip
        await self.report(staged)
        await self.report(
            ReportUp(
                node=NODE, instance=event.instance, directive=number, model=event.model, revision=event.revision,
                weight_set=f"ws_{event.model}", grant=event.grant, endpoint=self.frontends[event.instance].endpoint, pid=1,
                took_ms=1, bytes_mapped=1 << 20, bytes_used=2 << 20,
            )
        )  # fmt: skip
