"""Silence counts only while we could have heard."""

from controlplane.commands import CloseGateway, NodeHeard, NodeSilent
from controlplane.events import GatewayOpened, NodeFellSilent, NodeJoined
from controlplane.fleet import Fleet, fold
from controlplane.silence import Silence
from controlplane.subjects import GatewayBeat, NodeBeat
from tests.chronicle import Chronicle

JOINED = NodeJoined(node="n1", address="a", incarnation="inc_1", boot="b", pool_budget_bytes=1)
OPENED = GatewayOpened(gateway="gw_1", host="h", pid=1)


def fleet(*events: NodeJoined | NodeFellSilent | GatewayOpened) -> Fleet:
    return fold(Chronicle().record(*events))


def beat(incarnation: str = "inc_1") -> NodeBeat:
    return NodeBeat(
        node="n1", incarnation=incarnation, at_ms=0, pool_used_bytes=0, pool_budget_bytes=0, pool_ok=True, device_bytes={}
    )


def test_a_node_is_silent_after_three_seconds_without_a_beat() -> None:
    silence = Silence(100.0)
    silence.heard_node(beat(), 101.0)
    assert silence.commands(fleet(JOINED), 103.9) == []
    assert silence.commands(fleet(JOINED), 104.1) == [NodeSilent(node="n1")]


def test_a_node_that_never_beat_has_three_seconds_from_when_we_began_to_listen() -> None:
    silence = Silence(100.0)
    assert silence.commands(fleet(JOINED), 102.9) == []
    assert silence.commands(fleet(JOINED), 103.1) == [NodeSilent(node="n1")]


def test_a_silent_node_is_heard_again_with_its_next_beat() -> None:
    silence = Silence(100.0)
    silent = fleet(JOINED, NodeFellSilent(node="n1"))
    assert silence.commands(silent, 110.0) == []
    silence.heard_node(beat(), 111.0)
    assert silence.commands(silent, 111.1) == [NodeHeard(node="n1")]


def test_a_beat_of_another_run_of_the_worker_does_not_count() -> None:
    silence = Silence(100.0)
    silence.heard_node(beat("inc_2"), 104.0)
    assert silence.commands(fleet(JOINED), 104.1) == [NodeSilent(node="n1")]
    assert silence.commands(fleet(JOINED, NodeFellSilent(node="n1")), 104.1) == []


def test_a_gateway_that_has_just_opened_has_five_seconds_for_its_first_beat() -> None:
    silence = Silence(100.0)
    assert silence.commands(fleet(OPENED), 500.0) == []
    assert silence.commands(fleet(OPENED), 504.9) == []
    assert silence.commands(fleet(OPENED), 505.1) == [CloseGateway(gateway="gw_1", code="silent")]


def test_nobody_is_blamed_for_the_time_in_which_we_were_deaf() -> None:
    silence = Silence(100.0)
    silence.heard_node(beat(), 101.0)
    silence.heard_gateway(GatewayBeat(gateway="gw_1", at_ms=0), 101.0)
    silence.deaf(150.0)
    assert silence.commands(fleet(JOINED, OPENED), 152.9) == []
    assert silence.commands(fleet(JOINED, OPENED), 155.1) == [
        NodeSilent(node="n1"),
        CloseGateway(gateway="gw_1", code="silent"),
    ]


def test_a_gateway_has_five_seconds() -> None:
    silence = Silence(100.0)
    silence.heard_gateway(GatewayBeat(gateway="gw_1", at_ms=0), 101.0)
    assert silence.commands(fleet(OPENED), 105.9) == []
    assert silence.commands(fleet(OPENED), 106.1) == [CloseGateway(gateway="gw_1", code="silent")]
