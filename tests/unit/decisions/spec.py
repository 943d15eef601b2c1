"""given(...).when(command).then(events) / .then_refused(code): specifications of decisions.

The past is given as commands or, where a state can't be reached by commands alone, as events. `then` compares the kinds of
events, or whole events field by field where it is given a dict.
"""

from typing import Any

from controlplane.arguments import shaping
from controlplane.commands import (
    AnyCommand,
    DeviceFound,
    Hello,
    Load,
    OpenGateway,
    Order,
    RegisterModel,
    ReportCheckpointed,
    ReportModel,
    ReportSlept,
    ReportUp,
)
from controlplane.decisions import decide
from controlplane.envelope import Recorded
from controlplane.events import AnyEvent, InstanceDirected
from controlplane.fleet import Fleet, Instance, fold
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from controlplane.spec import Idle, ModelFacts, ModelSpec

NOW = 1_000_000
DEVICE = 800
"""Bytes of a device: a cell is 100."""


class Story:
    """A fleet with a past, told command by command at a time of its own."""

    def __init__(self) -> None:
        self.fleet, self.now, self.log = Fleet(), NOW, list[Recorded]()
        self.events: tuple[Recorded, ...] = ()
        self.refused: Refused | None = None
        self._count = 0

    def when(self, body: AnyCommand, *, after_ms: int = 0, id: str | None = None) -> "Story":
        """Decide the command, `after_ms` later. Its events become part of the past."""
        self._count += 1
        self.now += after_ms
        self.events, self.refused = (), None
        order = Order(id=id or f"cmd_{self._count:04d}", actor="test", body=body)
        before = self.fleet
        try:
            decision = decide(before, order, self.now)
        except Refused as refused:
            self.refused = refused
            return self
        assert decision == decide(before, order, self.now), "a decision is a function of its arguments"
        self.fleet, self.events = decision.fleet, decision.events
        self.log.extend(decision.events)
        assert fold(self.log) == self.fleet, "folding the log gives the live state"
        return self

    given = when

    def then(self, *expected: str | tuple[str, dict[str, Any]]) -> "Story":
        """The last command led to just these events."""
        assert self.refused is None, f"refused: {self.refused}"
        wanted = [e if isinstance(e, tuple) else (e, {}) for e in expected]
        assert [e.type for e in self.events] == [name for name, _ in wanted], [e.event for e in self.events]
        for recorded, (_, fields) in zip(self.events, wanted, strict=True):
            for field, value in fields.items():
                assert getattr(recorded.event, field) == value, recorded.event
        return self

    def then_nothing(self) -> "Story":
        return self.then()

    def then_refused(self, code: Code, **details: Any) -> "Story":
        assert self.refused is not None, f"not refused: {[e.event for e in self.events]}"
        assert self.refused.code is code, self.refused
        for name, value in details.items():
            assert self.refused.details[name] == value, self.refused.details
        return self

    # ---- reading ----

    def find(self, kind: type[AnyEvent]) -> list[Any]:
        """All events of that kind so far."""
        return [r.event for r in self.log if isinstance(r.event, kind)]

    def directive(self, instance: str) -> tuple[int, InstanceDirected]:
        recorded = [r for r in self.log if isinstance(r.event, InstanceDirected) and r.event.instance == instance][-1]
        assert isinstance(recorded.event, InstanceDirected)
        return recorded.position, recorded.event

    def instance_of(self, model: str) -> Instance:
        """The instance that serves, or is told to serve, the model."""
        return next(
            i for i in self.fleet.instances.values()
            if (i.directive and i.directive.model == model) or (i.model == model and i.rung is not Rung.COLD)
        )  # fmt: skip

    def code_of(self, request: str) -> str:
        return self.fleet.requests[request].code

    # ---- the worker's part ----

    def report_up(self, model: str, *, after_ms: int = 0) -> "Story":
        return self.when(self.up_report(model), after_ms=after_ms)

    def up_report(self, model: str) -> ReportUp:
        instance = next(i for i in self.fleet.instances.values() if i.directive and i.directive.model == model)
        number, e = self.directive(instance.instance)
        facts = self.fleet.models[model].facts
        size = facts.weight_bytes if facts else 0
        return ReportUp(
            node=e.node, instance=e.instance, directive=number, model=model, revision=e.revision, weight_set=f"ws_{model}",
            grant=e.grant or 0, endpoint="http://here", pid=1, took_ms=1, bytes_mapped=size, bytes_used=size,
        )  # fmt: skip

    def report_slept(self, instance: str, *, bytes_used: int = 0, after_ms: int = 0) -> "Story":
        return self.when(self.slept_report(instance, bytes_used=bytes_used), after_ms=after_ms)

    def slept_report(self, instance: str, *, bytes_used: int = 0) -> ReportSlept:
        number, e = self.directive(instance)
        return ReportSlept(node=e.node, instance=instance, directive=number, pid=1, took_ms=1, bytes_used=bytes_used)

    def report_checkpointed(self, instance: str, *, host_bytes: int = 7, after_ms: int = 0, **more: Any) -> "Story":
        number, e = self.directive(instance)
        assert e.rung is Rung.CHECKPOINT
        report = ReportCheckpointed(
            node=e.node, instance=instance, directive=number, pid=1, took_ms=1, host_bytes=host_bytes, **more
        )
        return self.when(report, after_ms=after_ms)

    def bring_up(self, model: str) -> "Story":
        """Load it, and let the worker succeed."""
        return self.when(Load(model=model)).report_up(model)


def plane(*, devices: int = 1, pool_bytes: int = 10_000, device_bytes: int = DEVICE, kind: str = "cpu") -> Story:
    """A node with so many devices, and gateway `gw_1`."""
    return (
        Story()
        .given(hello(devices=devices, pool_bytes=pool_bytes, device_bytes=device_bytes, kind=kind))
        .given(OpenGateway(gateway="gw_1", host="here", pid=1))
    )


def hello(*, devices: int = 1, pool_bytes: int = 10_000, device_bytes: int = DEVICE, kind: str = "cpu", **more: Any) -> Hello:
    found = tuple(DeviceFound(f"dev{n}", f"{kind}{n}", kind, device_bytes) for n in range(devices))
    fields: dict[str, Any] = {"incarnation": "inc_1", **more}
    return Hello(node="n1", address="127.0.0.1", boot="boot", pool_budget_bytes=pool_bytes, devices=found, **fields)


def spec(
    name: str, *, size: int = DEVICE, source: str = "", idle: Idle | None = None, gpu: bool = False, **more: Any
) -> ModelSpec:
    """A model that takes `size` bytes; with the same `source`, of the same configuration."""
    arguments: dict[str, Any] = {"weight_bytes": size, "skeleton_bytes": 0} | ({"gpu": True} if gpu else {})
    return ModelSpec(
        name=name, source=f"fake:{source or name}", engine="fake", arguments=arguments, idle=idle or Idle(), **more
    )


def facts(model: ModelSpec) -> ModelFacts:
    return ModelFacts(
        configuration=f"cfg_{model.source}", architecture="fake", weight_bytes=int(model.arguments["weight_bytes"]), kv_bytes=0,
        context_tokens=1024,
    )  # fmt: skip


def inspected(model: ModelSpec, revision: int = 1) -> ReportModel:
    arguments = shaping(model.engine, model.arguments)
    return ReportModel(node="n1", model=model.name, revision=revision, facts=facts(model), engine="fake", arguments=arguments)


def with_models(story: Story, *models: ModelSpec) -> Story:
    for model in models:
        story.given(RegisterModel(spec=model)).then("ModelRegistered")
        story.given(inspected(model))
    return story
