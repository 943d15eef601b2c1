"""The scripted worker of the simulation: how long things take, what goes wrong, what is there afterwards."""

from typing import Any

import msgspec

from controlplane.commands import (
    AnyCommand,
    ReportCheckpointed,
    ReportEnded,
    ReportFailed,
    ReportImageBuilt,
    ReportSaved,
    ReportSlept,
    ReportStaged,
    ReportUp,
)
from controlplane.events import InstanceDirected
from controlplane.fleet import Fleet
from controlplane.rungs import Rung
from controlplane.spec import ModelFacts, ModelSpec


class Script(msgspec.Struct, kw_only=True):
    """How long things take (milliseconds), and what goes wrong. May be changed at any moment of a run."""

    start_ms: int = 5_000
    wake_ms: int = 100
    sleep_ms: int = 100
    end_ms: int = 200
    inspect_ms: int = 50
    drop_ms: int = 20
    serve_ms: int = 500
    drain_ms: int = 30_000
    tick_ms: int = 1_000
    repeats: int = 1
    """How often each report is sent."""
    late_ms: int = 0
    """By how much the repetitions come later."""
    fail: dict[str, int] = {}
    """Model -> how many of its next climbs fail."""


class Engine(msgspec.Struct):
    """What really is there, for one instance."""

    instance: str
    node: str
    rung: Rung = Rung.COLD
    model: str | None = None
    revision: int = 0
    grant: int | None = None
    cells: tuple[tuple[str, int, int], ...] = ()
    """(device, offset, cells) whose memory it may use."""
    turn: int = 0
    """Counts directives; a step that belongs to an earlier one is dropped."""


class Reality(msgspec.Struct, kw_only=True):
    """What is really there on the nodes."""

    script: Script
    engines: dict[str, Engine] = {}
    pools: dict[str, dict[str, int]] = {}
    """Node -> weight set -> bytes."""

    def pool(self, node: str) -> dict[str, int]:
        return self.pools.setdefault(node, {})

    def outcome(self, directive: int, e: InstanceDirected, engine: Engine, fleet: Fleet) -> list[AnyCommand]:
        """A transition is over: make it so, and return the reports that say so."""
        me: dict[str, Any] = {"node": e.node, "instance": e.instance, "directive": directive}
        if e.rung is Rung.UP:
            return self._up(me, e, engine, fleet)
        spec = fleet.models[engine.model].spec if engine.model else None
        skeleton = skeleton_of(spec) * spec.gpus if spec else 0
        engine.rung, engine.grant, engine.cells = e.rung, None, ()
        if e.rung is Rung.SLEEP:
            return [ReportSlept(**me, pid=1, took_ms=1, bytes_used=skeleton)]
        if e.rung is Rung.CHECKPOINT:
            return [*self._staged(e, fleet), ReportCheckpointed(**me, pid=1, took_ms=1, host_bytes=skeleton)]
        if e.rung is Rung.SAVED:
            configuration = fleet.instances[e.instance].configuration
            built = ReportImageBuilt(
                node=e.node, image=f"img_{e.node}_{configuration}", configuration=configuration, size_bytes=1, took_ms=1,
                proof="same_tokens", fingerprint={},
            )  # fmt: skip
            return [built, ReportSaved(**me, image=built.image, took_ms=1)]
        del self.engines[e.instance]
        return [ReportEnded(**me, took_ms=1)]

    def _up(self, me: dict[str, Any], e: InstanceDirected, engine: Engine, fleet: Fleet) -> list[AnyCommand]:
        model = e.model or ""
        if self.script.fail.get(model, 0) > 0:
            self.script.fail[model] -= 1
            del self.engines[e.instance]
            return [ReportFailed(**me, rung=engine.rung, step="start", code="start_failed", message="scripted")]
        spec, weights = fleet.models[model].spec, _weights(e)
        facts, reports = facts_of(spec), self._staged(e, fleet)
        engine.rung, engine.model, engine.revision = Rung.UP, model, e.revision
        engine.cells = cells_of(e, fleet) or engine.cells  # after a move: only where it went
        used = facts.weight_bytes + facts.kv_bytes + skeleton_of(spec) * spec.gpus
        up = ReportUp(
            **me, model=model, revision=e.revision, weight_set=weights, grant=e.grant or 0, endpoint="http://here", pid=1,
            took_ms=1, bytes_mapped=facts.weight_bytes, bytes_used=used,
        )  # fmt: skip
        return [*reports, up]

    def _staged(self, e: InstanceDirected, fleet: Fleet) -> list[AnyCommand]:
        """Its weights in the pool, if the directive names any and they are not there."""
        pool = self.pool(e.node)
        if e.model is None or _weights(e) in pool:
            return []
        pool[_weights(e)] = size = facts_of(fleet.models[e.model].spec).weight_bytes
        return [
            ReportStaged(
                node=e.node, model=e.model, revision=e.revision, weight_set=_weights(e), size_bytes=size, took_ms=1
            )
        ]  # fmt: skip


def _weights(e: InstanceDirected) -> str:
    return f"ws_{e.model}_{e.revision}"


def cells_of(e: InstanceDirected, fleet: Fleet) -> tuple[tuple[str, int, int], ...]:
    """What a directive's grants allow."""
    grants = [fleet.grants.get(number) for number in e.gang or (e.grant or 0,)]
    return tuple((grant.device, grant.offset, grant.cells) for grant in grants if grant is not None)


def skeleton_of(spec: ModelSpec) -> int:
    return int(spec.arguments.get("skeleton_bytes", 0))


def facts_of(spec: ModelSpec) -> ModelFacts:
    """What opening the source of a scripted model gives; models of one `source` share a configuration."""
    return ModelFacts(
        configuration=f"cfg_{spec.source}", architecture="fake", weight_bytes=int(spec.arguments.get("weight_bytes", 0)),
        kv_bytes=int(spec.arguments.get("kv_bytes", 0)), context_tokens=1024,
    )  # fmt: skip
