"""The gateway's way to the decider, when the decider has forgotten it or is away."""

from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest

from controlplane.bus import Bus
from controlplane.commands import Admit, OpenGateway, Order
from controlplane.refusal import Code, Refused
from controlplane.subjects import GatewayBeat
from web import gateway as module
from web.gateway import Gateway


class Forgetful:
    """A decider that no longer knows the gateway, and is gone when it wants to open again."""

    nc = SimpleNamespace(is_connected=True)

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> None:
        if isinstance(order.body, Admit):
            raise Refused(Code.GATEWAY_UNKNOWN, "announce yourself first")
        raise Refused(Code.UNAVAILABLE, "no decider is listening", retry_after_ms=1000)


async def test_an_admission_while_the_gateway_can_not_open_again_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADMIT_S", 0.05)
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    bus: Any = Forgetful()
    made: Any = Gateway(bus, bus, bus)
    made.opened.set()

    def ask(gateway: str) -> Admit:
        return Admit(request="req_1", model="m", gateway=gateway, kind="chat", streamed=False, prompt_bytes=1)

    with pytest.raises(Refused) as refusal:
        await made.admit(ask)
    assert (refusal.value.code, refusal.value.retry_after_ms) == (Code.UNAVAILABLE, 1000)


@pytest.mark.parametrize("error", [nats.errors.ConnectionClosedError(), nats.errors.OutboundBufferLimitError(), OSError()])
async def test_a_beat_that_can_not_be_sent_ends_nobody(error: Exception) -> None:
    async def publish(subject: str, payload: bytes) -> None:
        raise error

    client: Any = SimpleNamespace(is_connected=True, publish=publish, jetstream=lambda timeout: None)
    await Bus(client, "web", "web").publish("beat.gateway.g", GatewayBeat(gateway="g", at_ms=1))


async def test_a_command_that_no_message_holds_is_refused_for_good() -> None:
    async def request(subject: str, payload: bytes, timeout: None) -> None:
        raise nats.errors.MaxPayloadError

    client: Any = SimpleNamespace(is_connected=True, request=request, max_payload=10, jetstream=lambda timeout: None)
    order = Order(id="cmd_1", actor="gateway:g", body=OpenGateway(gateway="g", host="h", pid=1))
    with pytest.raises(Refused, match="the bus takes 10") as refusal:
        await Bus(client, "web", "web").command("cmd.gateway", order)
    assert refusal.value.code is Code.INVALID
