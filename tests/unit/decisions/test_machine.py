"""Random fleets: whatever people, workers and time do, the invariants hold and every request ends once."""

import os
from collections import Counter
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from controlplane.commands import (
    ApplySettings,
    CancelRequest,
    Checkpoint,
    CloseGateway,
    End,
    EndRequests,
    Load,
    Move,
    NodeHeard,
    NodeSilent,
    OpenGateway,
    RegisterModel,
    ReportForeign,
    RetireModel,
    Retry,
    ReviseModel,
    Save,
    Sleep,
    Stop,
)
from controlplane.decisions import hostroom, standing
from controlplane.decisions.needs import held_bytes
from controlplane.decisions.placement import mask
from controlplane.envelope import Recorded
from controlplane.events import (
    InstanceCheckpointed,
    InstanceEnded,
    InstanceFailed,
    InstanceSlept,
    InstanceUp,
    NodeLimits,
    Outsider,
    RequestAccepted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestRouted,
)
from controlplane.fleet import Fleet, fold
from controlplane.refusal import Refused
from controlplane.rungs import Rung
from controlplane.scripted import Script
from controlplane.simulation import DEVICE_BYTES, Simulation
from controlplane.spec import Idle, ModelSpec

SKELETON = DEVICE_BYTES // 64
MODELS = {
    "whole": ("s1", 8), "base": ("s2", 4), "tuned": ("s2", 4), "half": ("s3", 4), "eighth": ("s4", 1), "pair": ("s5", 16),
    "twin": ("s5", 16), "duo": ("s6", 16),
}  # fmt: skip
"""name -> (configuration, cells, of two devices from 16 on)."""
TIMES = (1, 10, 100, 150, 400, 1_000, 2_000, 5_000, 10_000, 31_000)
models = st.sampled_from(sorted(MODELS))


def spec(name: str, **more: Any) -> ModelSpec:
    source, cells = MODELS[name]
    gpus = max(1, cells // 8)
    arguments: dict[str, Any] = {"weight_bytes": DEVICE_BYTES * cells // 8 - SKELETON * gpus, "skeleton_bytes": SKELETON}
    if name in ("base", "tuned", "half", "pair", "twin"):
        arguments["gpu"] = True
    if name in ("pair", "twin"):
        arguments["gang_checkpoint"] = True
    return ModelSpec(
        name=name,
        source=source,
        engine="fake",
        arguments=arguments,
        gpus=gpus,
        idle=Idle(sleep_ms=2_000, checkpoint_ms=1_500, saved_ms=3_000 if name == "half" else None, cold_ms=5_000),
        **more,
    )


def check(fleet: Fleet) -> None:
    """I1, I2, I3, nobody shut out of what is kept for him, and that the indexes and leases mean something."""
    cells: dict[str, int] = {}
    for number, grant in fleet.grants.items():
        bits = mask(grant.offset, grant.cells)
        assert grant.offset % grant.cells == 0
        assert grant.offset + grant.cells <= 8
        assert not cells.get(grant.device, 0) & bits, "I1: two grants of one cell"
        cells[grant.device] = cells.get(grant.device, 0) | bits
        assert number in fleet.instances[grant.instance].grants, "a grant without its instance"
        gang = [g for g in fleet.grants.values() if (g.gang or g.number) == (grant.gang or number)]
        assert [g.rank for g in sorted(gang, key=lambda g: g.rank)] == list(range(len(gang))), "half a gang"
        assert len(gang) == 1 or len({g.device for g in gang}) == len(gang), "two ranks on a device"
    used: Counter[str] = Counter()
    for instance in fleet.instances.values():
        assert not instance.running or instance.grant in fleet.grants, "I3: requests run without a grant"
        assert instance.leased_to <= set(fleet.requests), "leased to nobody"
        assert instance.rung is not Rung.CHECKPOINT or not instance.bytes_used, "off its device, and has bytes there"
        assert instance.running == sum(
            r.instance == instance.instance and r.lost_ms is None for r in fleet.requests.values()
        )  # fmt: skip
        assert not instance.gang or len(instance.gang) == len(instance.ranks), "half a gang holds"
        for device in fleet.devices:
            used[device] += held_bytes(fleet, instance, device)
    for known in fleet.devices.values():
        assert used[known.device] <= known.size_bytes, "I2: more bytes than the device has"
    for name, waiting in fleet.waiting.items():
        assert all(fleet.requests[r].code and fleet.requests[r].instance is None for r in waiting), "waits without a reason"
        instance = standing.serving(fleet, fleet.models[name])
        kept_for = [fleet.requests[r] for r in waiting if instance is not None and r in instance.leased_to]
        assert all(r.code == "reopened" for r in kept_for), "I8: the instance is kept for one who is not let in"


class Fleets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.accepted: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.attempts: dict[str, int] = {}
        self.gateways = 1

    @initialize(
        nodes=st.sampled_from([1, 1, 2, 3]), devices=st.integers(1, 3), pool=st.sampled_from([1.2, 2.0, 9.0]),
        repeats=st.integers(1, 3),
        late_ms=st.sampled_from([0, 30, 2_500]), start_ms=st.sampled_from([500, 4_000, 45_000]),
        sleep_ms=st.sampled_from([50, 1_000]), serve_ms=st.sampled_from([20, 700, 3_000]),
    )  # fmt: skip
    def begin(self, nodes: int, devices: int, pool: float, **script: int) -> None:
        self.sim = Simulation(nodes=nodes, devices=devices, pool_bytes=int(pool * DEVICE_BYTES), script=Script(**script))
        self.sim.on_event = self._watch
        for name in MODELS:
            self._send(RegisterModel(spec=spec(name)))  # refused: a gang that the node, or its pool, is too small for
        self.sim.run(100)

    def _watch(self, recorded: Recorded) -> None:
        match recorded.event:
            case RequestAccepted(request=request):
                self.accepted[request] += 1
            case RequestFinished(request=request) | RequestFailed(request=request) | RequestCancelled(request=request):
                self.ended[request] += 1
            case RequestRouted(request=request, attempt=attempt):
                assert attempt == self.attempts.get(request, 0) + 1, "I5: an attempt is skipped or repeated"
                self.attempts[request] = attempt
            case _:
                pass
        if recorded.position == self.sim.fleet.position:
            check(self.sim.fleet)  # after every decision

    def _watch_end(self, recorded: Recorded) -> None:
        """Nothing new comes, nothing goes wrong any more: somebody is always on his way, or tried again at a known time."""
        self._watch(recorded)
        match recorded.event:
            case (
                InstanceUp() | InstanceSlept() | InstanceCheckpointed() | InstanceEnded() | RequestFinished() | InstanceFailed()
            ):
                self.moved_ms = self.sim.now
            case RequestFailed(code="queue_timeout"):
                patience_ms = self.sim.script.start_ms + self.sim.script.late_ms + 10_000
                backs_off = any(model.set_back for model in self.sim.fleet.models.values())
                still_ms = self.sim.now - max(self.moved_ms, self.ending_ms)
                assert backs_off or still_ms <= patience_ms, f"I8: a standstill of {still_ms} ms while one waited"
            case _:
                pass

    def _node(self, nth: int) -> str:
        return self.sim.nodes[nth % len(self.sim.nodes)]

    def _send(self, body: Any) -> None:
        with suppress(Refused):
            self.sim.send(body)

    @rule(calls=st.lists(st.tuples(models, st.sampled_from(TIMES), st.booleans()), min_size=1, max_size=8))
    def traffic(self, calls: list[tuple[str, int, bool]]) -> None:
        for model, gap_ms, wait in calls:
            with suppress(Refused):
                self.sim.admit(model, wait=wait)
            self.sim.run(gap_ms if gap_ms < 2_000 else 0)

    @rule(ms=st.sampled_from(TIMES))
    def wait(self, ms: int) -> None:
        self.sim.run(ms)

    @rule(nth=st.integers(0, 50), by_operator=st.booleans())
    def cancel(self, nth: int, by_operator: bool) -> None:
        if requests := sorted(self.sim.fleet.requests):
            request = requests[nth % len(requests)]
            end = EndRequests(ends=(End(request=request, outcome="cancelled"),))
            self._send(CancelRequest(request=request) if by_operator else end)

    @rule(model=models, kind=st.sampled_from([Load, Sleep, Checkpoint, Save, Stop, Retry]))
    def operate(self, model: str, kind: type[Load | Sleep | Checkpoint | Save | Stop | Retry]) -> None:
        self._send(kind(model=model))

    @rule(model=models, device=st.integers(0, 2))
    def move(self, model: str, device: int) -> None:
        self._send(Move(what=model, device=f"cpu{device}"))

    @rule(nth=st.integers(0, 8), eighths=st.integers(0, 8))
    def strangers(self, nth: int, eighths: int) -> None:
        """Others have so much of a device."""
        taken = (Outsider(pid=1, size_bytes=DEVICE_BYTES * eighths // 8),) if eighths else ()
        device = sorted(self.sim.fleet.devices)[nth % len(self.sim.fleet.devices)]
        self._send(ReportForeign(node=self.sim.fleet.devices[device].node, device=device, processes=taken))

    @rule(skeletons=st.sampled_from([None, 0, 1, 2]), nth=st.integers(0, 2))
    def limit(self, skeletons: int | None, nth: int) -> None:
        """Engines off their devices may take so much of a host."""
        limits = NodeLimits(checkpoint_bytes=None if skeletons is None else skeletons * SKELETON)
        self._send(ApplySettings(path="e.toml", digest="d", models=(), node=self._node(nth), limits=limits))

    @rule(model=models, kind=st.sampled_from(["soft", "hard", "retire"]), variant=st.integers(0, 2))
    def edit(self, model: str, kind: str, variant: int) -> None:
        changed = spec(model, note=str(variant))
        if model not in self.sim.fleet.models:
            return
        if self.sim.fleet.models[model].retired:
            self._send(RegisterModel(spec=changed))
        elif kind == "retire":
            self._send(RetireModel(model=model))
        elif kind == "hard":
            self._send(ReviseModel(spec=replace(changed, arguments={**changed.arguments, "tokens_per_s": variant})))
        else:
            self._send(ReviseModel(spec=changed))

    @rule(
        kind=st.sampled_from(["kill", "fail", "restart", "lose", "down", "silence", "gateway"]),
        nth=st.integers(0, 10),
        model=models,
    )
    def trouble(self, kind: str, nth: int, model: str) -> None:
        engines = sorted(self.sim.engines)
        match kind:
            case "kill" if engines:
                self.sim.kill(engines[nth % len(engines)])
            case "fail":
                self.sim.script.fail[model] = 1 + nth % 3
            case "restart" | "lose":  # the worker comes back; an engine may have died unseen meanwhile
                found = sorted(e.instance for e in self.sim.engines.values() if e.rung not in (Rung.COLD, Rung.SAVED))
                if kind == "lose" and found:
                    node = self.sim.engines.pop(found[nth % len(found)]).node
                    self.sim.hello(node)
                else:
                    self.sim.hello(self._node(nth))
            case "down":
                self.sim.leave(self._node(nth))
                self.sim.run(nth * 300)
                self.holds()
                self.sim.hello(self._node(nth))
            case "silence":
                self._send(NodeSilent(node=self._node(nth)))
                self.sim.run(nth * 300)
                self.holds()
                self._send(NodeHeard(node=self._node(nth)))
            case "gateway":
                self.gateways += 1
                if nth % 2:
                    self._send(CloseGateway(gateway=self.sim.gateway, code="stopped"))
                self.sim.gateway = f"gw_{self.gateways}"
                self._send(OpenGateway(gateway=self.sim.gateway, host="here", pid=self.gateways))
            case _:
                pass

    @precondition(lambda self: hasattr(self, "sim"))
    @invariant()
    def holds(self) -> None:
        check(self.sim.fleet)
        held: dict[str, int] = {}
        for engine in self.sim.engines.values():
            for device, offset, cells in engine.cells:
                assert not held.get(device, 0) & mask(offset, cells), "two engines use one cell"
                held[device] = held.get(device, 0) | mask(offset, cells)
        assert all(count == 1 for count in self.ended.values()), "I4: ended twice"

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        self.sim.script.fail.clear()
        for node in self.sim.nodes:
            self._send(NodeHeard(node=node))
        for device in self.sim.fleet.devices.values():
            self._send(ReportForeign(node=device.node, device=device.device))
        self.ending_ms = self.moved_ms = self.sim.now
        self.sim.on_event = self._watch_end
        self.sim.run_until(Simulation.steady)
        self.sim.run(self.sim.script.tick_ms)  # what is due now
        self.sim.run_until(Simulation.steady)
        self.holds()
        fleet = self.sim.fleet
        assert self.ended == self.accepted, "I4: not every accepted request ended, once"
        assert not fleet.waiting
        for node in self.sim.nodes:
            limit = fleet.nodes[node].checkpoint_bytes
            assert limit is None or hostroom.held_bytes(fleet, node) <= limit, "more of the host than engines may take"
        assert fold(self.sim.log) == fleet, "I7: folding the log gives the live state"
        real = {e.instance: (e.rung, e.model if e.rung is Rung.UP else None, e.grant) for e in self.sim.engines.values()}
        believed = {i.instance: (i.rung, i.model if i.rung is Rung.UP else None, i.grant) for i in fleet.instances.values()}
        assert real == believed, "I7: what is there is what the plane believes"
        pooled = {(node, weight_set) for node in self.sim.nodes for weight_set in self.sim.reality.pool(node)}
        if self.sim.script.repeats == 1:  # else word of a set may come again after it has gone; the log knows it by its id
            assert pooled == {(w.node, w.weight_set) for w in fleet.weights.values()}, "I7: what pools have"


TestFleets = Fleets.TestCase
TestFleets.settings = settings(
    max_examples=int(os.environ.get("ENGINEHOUSE_EXAMPLES", "60")), stateful_step_count=40, deadline=None,
    suppress_health_check=list(HealthCheck), derandomize="ENGINEHOUSE_EXAMPLES" not in os.environ,
)  # fmt: skip
"""CI runs the same 60 every time, so that it can't fail by luck; set ENGINEHOUSE_EXAMPLES for a longer, random search."""
