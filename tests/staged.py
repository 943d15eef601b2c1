"""A plane on a stage: events folded into a fleet and kept in a list; no decider, bus or database behind it.

It gives the pages all that they ask of a plane (state, history, commands), so they can be tried and measured alone.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from controlplane import ids
from controlplane.answer import Answer, Done, Opened
from controlplane.commands import Load, Order, PinImage, RebuildImage, RemoveImage, Retry, Sleep, Stop
from controlplane.envelope import Recorded
from controlplane.events import (
    AnyEvent,
    ConfigurationFound,
    DeviceDeclared,
    GrantGiven,
    GrantReturned,
    ImageDismissed,
    ImagePinned,
    ImageRefused,
    InstanceCreated,
    InstanceDirected,
    InstanceSlept,
    InstanceUp,
    ModelInspected,
    ModelRegistered,
    NodeJoined,
    OperationRequested,
    RequestAccepted,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestQueued,
    RequestRouted,
    SkeletonMeasured,
    WeightsStaged,
)
from controlplane.fleet import ANEW, Fleet, evolve
from controlplane.log import Snapshot
from controlplane.refusal import Refused
from controlplane.rungs import Rung
from controlplane.spec import ModelFacts, ModelSpec
from controlplane.subjects import ImageAsk, ImageDone, NodeBeat

MIB = 1 << 20
GIB = 1 << 30
Listener = Callable[[object], None]


class StagedPlane:
    """Attributes: fleet, beats, synced, behind_s (what a `Sight` has), events, orders (commands received), refusing (raised by
    them), asks (of nodes), answering (their answer)."""

    def __init__(self, now_ms: int) -> None:
        self.fleet = Fleet()
        self.beats: dict[str, NodeBeat] = {}
        self.synced = True
        self.behind_s = 0.0
        self.events: list[Recorded] = []
        self.orders: list[Order] = []
        self.refusing: Refused | None = None
        self.asks: list[tuple[str, ImageAsk]] = []
        self.answering = ImageDone()
        self.now_ms = now_ms
        self._listeners: set[Listener] = set()

    # ---- the sight --------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, listener: Listener, /) -> Iterator[None]:
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    def tell(self, change: object) -> None:
        for listener in tuple(self._listeners):
            listener(change)

    def emit(
        self, event: AnyEvent, *, operation: str | None = None, because: int | None = None, actor: str = "desk", ago_ms: int = 0
    ) -> Recorded:
        """Record `event` as of `ago_ms` before now."""
        recorded = Recorded(
            position=self.fleet.position + 1, stream=event.stream, version=self.fleet.versions.get(event.stream, 0) + 1,
            at_ms=self.now_ms - ago_ms, command=ids.new(ids.COMMAND), ordinal=0, event=event, operation=operation,
            because=because, actor=actor,
        )  # fmt: skip
        self.fleet = evolve(self.fleet, recorded)
        self.events.append(recorded)
        self.tell(recorded)
        return recorded

    def beat(self, beat: NodeBeat) -> None:
        self.beats[beat.node] = beat
        self.tell(beat)

    # ---- the history ------------------------------------------------------------------------------------------

    async def head(self) -> int:
        return len(self.events)

    async def read(self, after: int, limit: int = 5000) -> list[Recorded]:
        return self.events[after : after + limit]

    async def first_since(self, at_ms: int) -> int:
        return bisect.bisect_left(self.events, at_ms, key=lambda event: event.at_ms) + 1

    async def snapshot(self, evolve_version: int, *, after: int = 0, up_to: int | None = None) -> Snapshot | None:
        return None

    async def page_of_events(
        self, *, before: int | None, limit: int, stream: str | None = None, type: str | None = None,
        types: Sequence[str] | None = None,
    ) -> Sequence[Recorded]:  # fmt: skip
        found = (r for r in reversed(self.events) if before is None or r.position < before)
        found = (r for r in found if stream in (None, r.stream) and type in (None, r.type))
        return [r for r in found if types is None or r.type in types][:limit]

    async def page_of_ended(
        self, *, before: int | None, limit: int, model: str | None = None, outcome: str | None = None
    ) -> Sequence[Recorded]:
        kinds = {"finished": RequestFinished, "failed": RequestFailed, "cancelled": RequestCancelled}
        wanted = kinds[outcome] if outcome else RequestFinished | RequestFailed | RequestCancelled
        found = (r for r in reversed(self.events) if before is None or r.position < before)
        return [r for r in found if isinstance(r.event, wanted) and model in (None, r.event.model)][:limit]

    async def page_of_operation(self, operation: str, *, before: int | None, limit: int) -> Sequence[Recorded]:
        found = (r for r in reversed(self.events) if before is None or r.position < before)
        return [r for r in found if r.operation == operation][:limit]

    # ---- the commands -----------------------------------------------------------------------------------------

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer:
        self.orders.append(order)
        if self.refusing is not None:
            raise self.refusing
        if isinstance(order.body, PinImage | RebuildImage | RemoveImage):
            return Done(position=self.emit(self._of_image(order.body), actor=order.actor).position)
        assert isinstance(order.body, Load | Sleep | Stop | Retry)
        kind, operation = type(order.body).__name__.lower(), ids.derived(ids.OPERATION, order.id)
        event = OperationRequested(operation=operation, kind=kind, model=order.body.model)
        recorded = self.emit(event, operation=operation, actor=order.actor)
        return Opened(position=recorded.position, operation=operation)

    def _of_image(self, body: PinImage | RebuildImage | RemoveImage) -> AnyEvent:
        image = self.fleet.images[body.image]
        match body:
            case PinImage():
                return ImagePinned(node=image.node, image=image.image, pinned=body.pinned)
            case RebuildImage():
                return ImageRefused(
                    node=image.node, image=image.image, configuration=image.configuration, code=ANEW, message="asked for"
                )
            case RemoveImage():
                return ImageDismissed(node=image.node, image=image.image, code=body.code)

    async def ask(self, node: str, ask: ImageAsk) -> ImageDone:
        self.asks.append((node, ask))
        return self.answering

    # ---- what a plane is made of ------------------------------------------------------------------------------

    def node(self, node: str = "n1", pool_bytes: int = GIB, image_pins: tuple[str, ...] = ()) -> None:
        self.emit(
            NodeJoined(
                node=node, address="127.0.0.1", incarnation="inc_1", boot="b", pool_budget_bytes=pool_bytes, version="0.1.0",
                image_pins=image_pins,
            )
        )  # fmt: skip

    def device(self, name: str, node: str = "n1", size_bytes: int = GIB, kind: str = "cpu") -> str:
        device = f"dev-{node}-{name}"
        self.emit(DeviceDeclared(node=node, device=device, name=name, kind=kind, size_bytes=size_bytes))
        return device

    def model(
        self, name: str, configuration: str, *, weight_bytes: int = 258 * MIB, architecture: str = "LlamaForCausalLM",
        aliases: tuple[str, ...] = (), note: str = "", engine: str = "transformers",
    ) -> None:  # fmt: skip
        spec = ModelSpec(name="x", source="/srv/models/x", aliases=aliases, note=note)
        spec = replace(spec, name=name, engine=engine)
        self.emit(ModelRegistered(model=name, spec=spec, origin="settings"), ago_ms=600_000)
        if configuration not in self.fleet.configurations:
            self.emit(
                ConfigurationFound(configuration=configuration, engine=engine, architecture=architecture, arguments={}),
                ago_ms=590_000,
            )
            self.emit(SkeletonMeasured(configuration=configuration, size_bytes=212 * MIB), ago_ms=580_000)
        facts = ModelFacts(
            configuration=configuration, architecture=architecture, weight_bytes=weight_bytes, kv_bytes=64 * MIB,
            context_tokens=2048, parameters=134_515_008, dtype="bfloat16",
        )  # fmt: skip
        self.emit(ModelInspected(model=name, revision=1, inspected_by="n1", facts=facts), ago_ms=580_000)

    def weights(self, model: str, weight_set: str, size_bytes: int = 258 * MIB, ago_ms: int = 0) -> None:
        self.emit(
            WeightsStaged(
                node="n1",
                weight_set=weight_set,
                model=model,
                revision=1,
                size_bytes=size_bytes,
                took_ms=840,
                read_bytes=size_bytes,
            ),
            ago_ms=ago_ms,
        )

    def instance(self, instance: str, configuration: str, node: str = "n1") -> None:
        self.emit(InstanceCreated(node=node, instance=instance, configuration=configuration))

    def climb(
        self, instance: str, model: str, device: str, offset: int, cells: int, *, node: str = "n1", ago_ms: int = 0,
        operation: str | None = None,
    ) -> int:  # fmt: skip
        """Grant the cells and direct the instance up; returns the directive's number."""
        grant = self.emit(
            GrantGiven(node=node, device=device, instance=instance, offset=offset, cells=cells),
            ago_ms=ago_ms,
            operation=operation,
        )
        directed = InstanceDirected(
            node=node, instance=instance, rung=Rung.UP, model=model, revision=1, grant=grant.position, code="request"
        )
        return self.emit(directed, ago_ms=ago_ms, because=grant.position, operation=operation).position

    def up(self, instance: str, *, weight_set: str, ago_ms: int = 0, mapped: int = 258 * MIB, used: int = 421 * MIB) -> None:
        found = self.fleet.instances[instance]
        directive = found.directive
        assert directive is not None and directive.model is not None and directive.grant is not None
        self.emit(
            InstanceUp(
                node=found.node, instance=instance, directive=directive.number, model=directive.model, revision=1,
                weight_set=weight_set, grant=directive.grant, endpoint="http://127.0.0.1:41733", pid=4242, took_ms=41,
                bytes_mapped=mapped, bytes_used=used,
            ),
            ago_ms=ago_ms, because=directive.number, operation=directive.operation, actor="node:n1",
        )  # fmt: skip

    def sleep(self, instance: str, ago_ms: int = 0, *, code: str = "", message: str = "") -> None:
        """`code`, `message`: why it is only there."""
        found = self.fleet.instances[instance]
        grant = self.fleet.grants[found.grant or 0]
        told = self.emit(
            InstanceDirected(node=found.node, instance=instance, rung=Rung.SLEEP, code="idle"), ago_ms=ago_ms + 500
        )
        self.emit(
            InstanceSlept(
                node=found.node, instance=instance, directive=told.position, pid=4243, took_ms=22, bytes_used=214 * MIB,
                code=code, message=message,
            ),
            ago_ms=ago_ms, because=told.position, actor="node:n1",
        )  # fmt: skip
        self.emit(GrantReturned(node=found.node, device=grant.device, instance=instance, grant=grant.number), ago_ms=ago_ms)

    def request(self, model: str, *, instance: str | None = None, reason: str = "", place: int = 1, ago_ms: int = 0) -> str:
        """Accept a request; route it to `instance`, or queue it for `reason`."""
        request = ids.new(ids.REQUEST)
        self.emit(
            RequestAccepted(request=request, model=model, gateway="gw_1", kind="chat", streamed=True, prompt_bytes=412),
            ago_ms=ago_ms, actor="gateway:gw_1",
        )  # fmt: skip
        if instance is not None:
            endpoint = "http://127.0.0.1:41733"
            self.emit(
                RequestRouted(request=request, model=model, instance=instance, runs_on="n1", grant=1, endpoint=endpoint),
                ago_ms=ago_ms,
            )
        elif reason:
            self.emit(RequestQueued(request=request, model=model, code="climbing", reason=reason, place=place), ago_ms=ago_ms)
        return request

    def end(self, request: str, kind: str = "finished", ago_ms: int = 0, code: str = "engine_died", message: str = "") -> None:
        known = self.fleet.requests[request]
        took = self.now_ms - ago_ms - known.accepted_ms
        fields = {
            "request": request, "model": known.model, "kind": known.kind, "streamed": known.streamed,
            "accepted_ms": known.accepted_ms, "instance": known.instance, "attempts": known.attempts, "prompt_tokens": 52,
            "completion_tokens": 128, "queued_ms": min(took, 3), "first_token_ms": min(took, 38), "took_ms": took,
        }  # fmt: skip
        event: AnyEvent
        match kind:
            case "failed":
                event = RequestFailed(**fields, code=code, message=message or "its engine ended while it was answering")
            case "cancelled":
                event = RequestCancelled(**fields, by="caller", phase="running")
            case _:
                event = RequestFinished(**fields, finish_reason="stop")
        self.emit(event, ago_ms=ago_ms, actor="gateway:gw_1")
