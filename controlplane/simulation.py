"""A whole fleet in virtual time: the real decisions, with scripted workers and gateways instead of processes.

Nothing here sleeps or reads a clock. `send` decides a command at once; what the fake worker and gateway do about its events
happens when `run` gets to it. Tests drive random fleets with it; a policy can be tried on a recorded day of requests.
"""

import heapq
from collections.abc import Callable
from functools import partial

from controlplane import ids
from controlplane.arguments import shaping
from controlplane.commands import (
    Admit,
    AnyCommand,
    DeviceFound,
    End,
    EndRequests,
    Farewell,
    Hello,
    InstanceFound,
    Interrupt,
    OpenGateway,
    Order,
    ReportDropped,
    ReportFailed,
    ReportModel,
    Tick,
)
from controlplane.decisions import decide
from controlplane.envelope import Recorded
from controlplane.events import (
    InstanceDirected,
    ModelCleared,
    ModelRegistered,
    ModelRevised,
    RequestRouted,
    WeightsDismissed,
)
from controlplane.fleet import Fleet
from controlplane.refusal import Refused
from controlplane.rungs import Rung
from controlplane.scripted import Engine, Reality, Script, cells_of, facts_of
from controlplane.spec import ModelSpec

NODE, GATEWAY, DEVICE_BYTES = "n1", "gw_1", 1 << 30


class Simulation:
    """Nodes (`n1`, `n2`, ...) that are alike, one gateway, the decisions between them.

    Attributes:
        fleet: the live state. log: every event so far. now: Unix milliseconds. nodes: their names.
    """

    def __init__(self, *, nodes: int = 1, devices: int = 1, pool_bytes: int = 1 << 40, script: Script | None = None) -> None:
        self.script = script or Script()
        self.fleet, self.log, self.now = Fleet(), list[Recorded](), 1_000_000
        self.reality = Reality(script=self.script)
        self.engines = self.reality.engines
        self.nodes = tuple(f"n{number + 1}" for number in range(nodes))
        self.refusals: list[Refused] = []
        self.on_event: Callable[[Recorded], None] = lambda recorded: None
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._sent = self._stamp = 0
        self._boots = dict.fromkeys(self.nodes, 0)
        self._devices, self._pool_bytes = devices, pool_bytes
        for node in self.nodes:
            self.hello(node)
        self.gateway = GATEWAY
        self.send(OpenGateway(gateway=self.gateway, host="here", pid=1))
        self._every_tick()

    # ---- commands ----

    def send(self, body: AnyCommand, *, actor: str = "test") -> tuple[Recorded, ...]:
        """Decide a command now. Raises Refused."""
        self._sent += 1
        order = Order(id=f"cmd_{self._sent:08d}", actor=actor, body=body)
        decision = decide(self.fleet, order, self.now)
        self.fleet = decision.fleet
        for recorded in decision.events:
            self.log.append(recorded)
            self.on_event(recorded)
            self._react(recorded)
        return decision.events

    def admit(self, model: str, *, wait: bool = True) -> str:
        """Send a request for the model; its id. Raises Refused."""
        request = f"{ids.REQUEST}_{self._sent + 1:08d}"
        self.send(
            Admit(
                request=request, model=model, gateway=self.gateway, kind="chat", streamed=True, prompt_bytes=8, wait=wait
            )
        )  # fmt: skip
        return request

    def hello(self, node: str = NODE) -> None:
        """The node's worker starts (again) and says what it found."""
        self._boots[node] += 1
        found = tuple(
            InstanceFound(e.instance, e.rung, e.model, e.grant)
            for e in self.engines.values()
            if e.node == node and e.rung is not Rung.COLD
        )
        prefix = "" if node == NODE else f"{node}-"
        devices = tuple(DeviceFound(f"{prefix}dev{n}", f"cpu{n}", "cpu", DEVICE_BYTES) for n in range(self._devices))
        self.send(
            Hello(
                node=node, address="127.0.0.1", incarnation=f"inc_{node}_{self._boots[node]}", boot="boot", devices=devices,
                pool_budget_bytes=self._pool_bytes, instances=found, weight_sets=tuple(self.reality.pool(node)),
            )
        )  # fmt: skip

    def leave(self, node: str = NODE) -> None:
        """The node's plane is ended in order: whatever has a process there, and the pool. `hello` starts it again."""
        for engine in [e for e in self.engines.values() if e.node == node and e.rung not in (Rung.COLD, Rung.SAVED)]:
            del self.engines[engine.instance]
        self.reality.pool(node).clear()
        self.send(Farewell(node=node))

    def kill(self, instance: str, code: str = "engine_died") -> None:
        """Its process dies: the worker sees it at once, so do the gateway's streams."""
        engine = self.engines.pop(instance, None)
        known = self.fleet.instances.get(instance)
        if engine is None or known is None:
            return
        lost = [r for r in self.fleet.requests.values() if r.instance == instance]
        directive = known.directive.number if known.directive else 0
        self._report(
            ReportFailed(
                node=engine.node, instance=instance, directive=directive, rung=known.rung, step="serve", code=code,
                message="it died",
            )
        )  # fmt: skip
        for request in lost:
            body = Interrupt(request=request.request, attempt=request.attempts, sent_chars=0, code=code, message="it died")
            self._after(1, partial(self._try, body))

    # ---- time ----

    def run(self, for_ms: int) -> None:
        """Let virtual time pass."""
        until = self.now + for_ms
        while self._agenda and self._agenda[0][0] <= until:
            at, _, action = heapq.heappop(self._agenda)
            self.now = max(self.now, at)
            action()
        self.now = until

    def run_until(self, condition: Callable[["Simulation"], bool], limit_ms: int = 600_000) -> None:
        """Let time pass until the condition holds. Raises TimeoutError with what is open then."""
        until = self.now + limit_ms
        while not condition(self):
            if not self._agenda or self._agenda[0][0] > until:
                raise TimeoutError(f"after {limit_ms} ms: {list(self.fleet.requests.values())}, {self.fleet.instances}")
            self.run(self._agenda[0][0] - self.now)

    def steady(self) -> bool:
        """Nothing waits, runs or is on its way."""
        fleet = self.fleet
        standing = all(i.directive_settled for i in fleet.instances.values())
        return standing and not fleet.requests and not fleet.operations

    def _after(self, delay_ms: int, action: Callable[[], None]) -> None:
        self._stamp += 1
        heapq.heappush(self._agenda, (self.now + delay_ms, self._stamp, action))

    def _every_tick(self) -> None:
        self.send(Tick(), actor="desk")
        self._after(self.script.tick_ms, self._every_tick)

    # ---- the fake worker and gateway ----

    def _react(self, recorded: Recorded) -> None:
        match recorded.event:
            case InstanceDirected() as e:
                engine = self.engines.setdefault(e.instance, Engine(instance=e.instance, node=e.node))
                engine.turn += 1
                self._step(recorded.position, e, engine, engine.turn, self.now + self.script.drain_ms)
            case ModelRegistered() as e:
                self._inspect(e.spec, e.revision)
            case ModelRevised(hard=True) as e:
                self._inspect(e.spec, e.revision)
            case ModelCleared() as e if self.fleet.models[e.model].facts is None:
                self._inspect(self.fleet.models[e.model].spec, self.fleet.models[e.model].revision)
            case WeightsDismissed() as e:
                self.reality.pool(e.node).pop(e.weight_set, None)
                report = ReportDropped(node=e.node, weight_set=e.weight_set, code="dismissed")
                self._after(self.script.drop_ms, lambda: self._report(report))
            case RequestRouted() as e:
                self._after(self.script.serve_ms, partial(self._finish, e))
            case _:
                pass

    def _inspect(self, spec: ModelSpec, revision: int) -> None:
        facts = facts_of(spec)
        report = ReportModel(
            node=NODE, model=spec.name, revision=revision, facts=facts, engine="fake",
            arguments=shaping(spec.engine, spec.arguments),
        )  # fmt: skip
        self._after(self.script.inspect_ms, lambda: self._report(report))

    def _finish(self, e: RequestRouted) -> None:
        request = self.fleet.requests.get(e.request)
        if request is None or request.instance != e.instance or request.attempts != e.attempt or request.lost_ms is not None:
            return
        self.send(EndRequests(ends=(End(request=e.request, outcome="finished", completion_tokens=5),)), actor="gateway")

    def _step(self, directive: int, e: InstanceDirected, engine: Engine, turn: int, drained_by: int) -> None:
        """Begin a transition: after the last request, or at the end of the drain."""
        known = self.fleet.instances.get(e.instance)
        if known is None or engine.turn != turn:
            return
        if known.running and self.now < drained_by:
            self._after(50, lambda: self._step(directive, e, engine, turn, drained_by))
            return
        script = self.script
        took = {Rung.UP: script.wake_ms if engine.rung is not Rung.COLD else script.start_ms, Rung.SLEEP: script.sleep_ms}
        if e.rung is Rung.UP and (cells := cells_of(e, self.fleet)):
            engine.grant, engine.cells = e.grant, tuple(dict.fromkeys((*engine.cells, *cells)))
        self._after(took.get(e.rung, script.end_ms), lambda: self._arrive(directive, e, engine, turn))

    def _arrive(self, directive: int, e: InstanceDirected, engine: Engine, turn: int) -> None:
        if engine.turn != turn or self.engines.get(e.instance) is not engine:
            return
        for report in self.reality.outcome(directive, e, engine, self.fleet):
            self._report(report)

    def _report(self, report: AnyCommand) -> None:
        self._try(report)
        for nth in range(1, self.script.repeats):
            self._after(self.script.late_ms * nth, lambda: self._try(report))

    def _try(self, body: AnyCommand) -> None:
        try:
            self.send(body, actor=f"node:{getattr(body, 'node', NODE)}")
        except Refused as refused:
            self.refusals.append(refused)
