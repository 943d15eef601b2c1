"""The decider's ear on the bus: commands to the desk, beats to `Silence`, the state to whoever asks."""

import asyncio
import secrets
import time
import zlib
from typing import Final

import msgspec
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from controlplane import ids, subjects
from controlplane.answer import Reply
from controlplane.bus import ENCODING, Bus, give_pulse
from controlplane.commands import (
    Admit,
    ApplySettings,
    BeginReign,
    CancelRequest,
    Checkpoint,
    CloseGateway,
    EndRequests,
    Interrupt,
    Load,
    Move,
    NodeHeard,
    NodeSilent,
    OpenGateway,
    Order,
    PinImage,
    RebuildImage,
    RegisterModel,
    RemoveImage,
    RetireModel,
    Retry,
    ReviseModel,
    Save,
    Sleep,
    Stop,
    Tick,
)
from controlplane.desk import DESK, Desk
from controlplane.envelope import without_nul
from controlplane.fleet import Fleet, dump
from controlplane.refusal import Code, Refusal
from controlplane.silence import Silence
from controlplane.subjects import Echo, GatewayBeat, NodeBeat
from controlplane.uptime import uptime_s

ROUND_S: Final = 0.25
COMPRESS_BYTES: Final = 64 * 1024
_orders = msgspec.json.Decoder(Order)
_node_beats = msgspec.json.Decoder(NodeBeat)
_gateway_beats = msgspec.json.Decoder(GatewayBeat)
_echoes = msgspec.json.Decoder(Echo)
_encoder = msgspec.json.Encoder()
log = structlog.get_logger("reception")


class Reception:
    """`open` subscribes, `rounds` runs the clock, `close` stops listening."""

    def __init__(self, bus: Bus, desk: Desk) -> None:
        self._bus, self._desk = bus, desk
        self._silence = Silence(uptime_s())
        self._name = secrets.token_hex(8)
        self._subscriptions: list[Subscription] = []
        self._dumped: tuple[int, bytes] = (-1, b"")
        self._ticking: asyncio.Task[Reply] | None = None
        self._forget = bus.on_reconnect(lambda: self._silence.deaf(uptime_s()))

    async def open(self) -> None:
        nc = self._bus.nc
        self._subscriptions = [
            await nc.subscribe(subjects.COMMANDS, cb=self._command),
            await nc.subscribe(subjects.ASK_STATE, cb=self._state),
            await nc.subscribe(subjects.BEATS, cb=self._beat),
            await nc.subscribe(subjects.ASK_PULSE, cb=give_pulse),
        ]
        await nc.flush(5)

    async def close(self) -> None:
        self._forget()
        for subscription in self._subscriptions:
            try:
                await subscription.unsubscribe()
            except nats.errors.Error as error:
                log.info("unsubscribe_failed", error=repr(error))

    async def rounds(self) -> None:
        """Every 250 ms: what silence and time make due. For ever."""
        while True:
            await asyncio.sleep(ROUND_S)
            now = uptime_s()
            await self._bus.publish(subjects.BEAT_DESK, Echo(desk=self._name, sent_s=now))
            fleet = self._desk.fleet
            for body in self._silence.commands(fleet, now):
                await self._desk.submit(Order(id=ids.new(ids.COMMAND), actor=DESK, body=body))
            if timely(fleet) and (self._ticking is None or self._ticking.done()):
                since_ms = time.time_ns() // 1_000_000 - round(1000 * (now - self._silence.back_since(now)))
                tick = Order(id=ids.new(ids.COMMAND), actor=DESK, body=Tick(since_ms=since_ms))
                self._ticking = asyncio.create_task(self._desk.submit(tick))

    async def _command(self, message: Msg) -> None:
        async def respond(reply: Reply) -> None:
            if message.reply:
                try:
                    await message.respond(_encoder.encode(reply))
                except nats.errors.Error as error:  # the asker asks again and gets this answer from the log
                    log.warning("reply_lost", subject=message.subject, error=repr(error))

        try:
            order = _orders.decode(without_nul(message.data))
        except (msgspec.DecodeError, RecursionError) as error:
            await respond(Refusal(Code.INVALID, f"not a command: {error}"))
            return
        if (refusal := misdirected(message.subject, order)) is not None:
            await respond(refusal)
        else:
            self._desk.enqueue(order, respond)

    async def _state(self, message: Msg) -> None:
        fleet = self._desk.fleet
        if self._dumped[0] != fleet.position:
            self._dumped = fleet.position, dump(fleet)
        state = self._dumped[1]
        if len(state) < COMPRESS_BYTES:
            await message.respond(state)
        elif message.reply:
            packed = await asyncio.to_thread(zlib.compress, state, 1)
            await self._bus.nc.publish(message.reply, packed, headers={ENCODING: "deflate"})

    async def _beat(self, message: Msg) -> None:
        now, kind = uptime_s(), message.subject.split(".")
        try:
            if message.subject == subjects.BEAT_DESK:
                echo = _echoes.decode(message.data)
                if echo.desk == self._name:
                    self._silence.echoed(echo.sent_s, now)
            elif kind[1] == "node":
                beat = _node_beats.decode(message.data)
                if beat.node == kind[2]:
                    self._silence.heard_node(beat, now)
            else:
                self._silence.heard_gateway(_gateway_beats.decode(message.data), now)
        except (msgspec.DecodeError, IndexError) as error:
            log.warning("beat_unreadable", subject=message.subject, error=repr(error))


def timely(fleet: Fleet) -> bool:
    """Whether the passing of time could matter at all: without models, requests and instances nothing is ever due."""
    return bool(fleet.models or fleet.requests or fleet.instances or fleet.operations or fleet.weights)


_OPERATOR = (
    ApplySettings, Checkpoint, Load, Move, RegisterModel, RetireModel, Retry, ReviseModel, Save, Sleep, Stop, CancelRequest,
    RemoveImage, RebuildImage, PinImage,
)  # fmt: skip
_GATEWAY = (Admit, CancelRequest, CloseGateway, EndRequests, Interrupt, OpenGateway)
_DESK = (BeginReign, NodeHeard, NodeSilent, Tick)


def misdirected(subject: str, order: Order) -> Refusal | None:
    """Refuse what comes by the wrong way: the server lets each party publish on its own subjects only, so the subject
    is what proves the author."""
    body, actor = order.body, order.actor
    by = type(body).__name__
    if isinstance(body, _DESK) or actor == DESK or (isinstance(body, CloseGateway) and body.code == "silent"):
        return Refusal(Code.INVALID, f"{by} is the desk's own command")
    if subject == subjects.COMMAND_OPERATOR and isinstance(body, _OPERATOR) and not actor.startswith("node:"):
        return None
    if subject == subjects.COMMAND_GATEWAY and isinstance(body, _GATEWAY) and not actor.startswith("node:"):
        return None
    node = getattr(body, "node", None)
    if node is not None and subject == subjects.command_node(node) and actor == f"node:{node}":
        return None
    return Refusal(Code.INVALID, f"{by} of {actor or 'nobody'} does not belong on {subject}", details={"node": node})
