"""Silence counts only while we could have heard."""

from msgspec.structs import replace

from controlplane.commands import CloseGateway, NodeHeard, NodeSilent
from controlplane.events import GatewayOpened, NodeFellSilent, NodeJoined, NodeLeft
from controlplane.fleet import Fleet, fold
from controlplane.silence import Silence
from controlplane.subjects import GatewayBeat, NodeBeat
from tests.chronicle import Chronicle

JOINED = NodeJoined(node="n1", address="a", incarnation="inc_1", boot="b", pool_budget_bytes=1)
OPENED = GatewayOpened(gateway="gw_1", host="h", pid=1)


def fleet(*events: NodeJoined | NodeFellSilent | NodeLeft | GatewayOpened) -> Fleet:
    return fold(Chronicle().record(*events))


def listening(began: float, until: float) -> Silence:
    """One that has heard its echo four times a second."""
    silence = Silence(began)
    hear(silence, began, until)
    return silence


def hear(silence: Silence, began: float, until: float) -> None:
    for quarter in range(1, round(4 * (until - began)) + 1):
        silence.echoed(began + quarter / 4, began + quarter / 4 + 0.01)


def beat(incarnation: str = "inc_1") -> NodeBeat:
    return NodeBeat(
        node="n1", incarnation=incarnation, at_ms=0, pool_used_bytes=0, pool_budget_bytes=0, pool_ok=True, device_bytes={}
    )


def test_a_node_is_silent_after_three_seconds_without_a_beat() -> None:
    silence = listening(100.0, 101.0)
    silence.heard_node(beat(), 101.0)
    hear(silence, 101.0, 104.0)
    assert silence.commands(fleet(JOINED), 104.0) == []
    hear(silence, 104.0, 104.25)
    assert silence.commands(fleet(JOINED), 104.3) == [NodeSilent(node="n1")]


def test_a_node_that_never_beat_has_three_seconds_from_when_we_began_to_listen() -> None:
    silence = listening(100.0, 103.0)
    assert silence.commands(fleet(JOINED), 103.0) == []
    hear(silence, 103.0, 103.25)
    assert silence.commands(fleet(JOINED), 103.3) == [NodeSilent(node="n1")]


def test_a_silent_node_is_heard_again_with_its_next_beat() -> None:
    silence = listening(100.0, 110.0)
    silent = fleet(JOINED, NodeFellSilent(node="n1"))
    assert silence.commands(silent, 110.0) == []
    silence.heard_node(beat(), 111.0)
    assert silence.commands(silent, 111.1) == [NodeHeard(node="n1")]


def test_a_beat_of_another_run_of_the_worker_does_not_count() -> None:
    silence = listening(100.0, 104.25)
    silence.heard_node(beat("inc_2"), 104.0)
    assert silence.commands(fleet(JOINED), 104.3) == [NodeSilent(node="n1")]
    assert silence.commands(fleet(JOINED, NodeFellSilent(node="n1")), 104.3) == []


def test_a_worker_that_has_just_said_hello_has_three_seconds_for_its_first_beat() -> None:
    silence = listening(100.0, 110.0)
    assert silence.commands(fleet(), 110.0) == []
    assert silence.commands(fleet(JOINED), 110.1) == []
    hear(silence, 110.0, 113.0)
    assert silence.commands(fleet(JOINED), 113.0) == []
    hear(silence, 113.0, 113.5)
    assert silence.commands(fleet(JOINED), 113.5) == [NodeSilent(node="n1")]
    again = replace(JOINED, incarnation="inc_2")
    assert silence.commands(fleet(JOINED, again), 113.6) == []
    silence.heard_node(beat("inc_2"), 114.0)
    hear(silence, 113.5, 116.0)
    assert silence.commands(fleet(JOINED, again), 116.0) == []


def test_the_last_beats_of_a_worker_whose_plane_has_ended_bring_its_node_back_to_nobody() -> None:
    silence = listening(100.0, 104.25)
    silence.heard_node(beat(), 104.0)
    assert silence.commands(fleet(JOINED, NodeLeft(node="n1")), 104.1) == []


def test_a_gateway_that_has_just_opened_has_five_seconds_for_its_first_beat() -> None:
    silence = listening(100.0, 500.0)
    assert silence.commands(fleet(OPENED), 500.0) == []
    hear(silence, 500.0, 505.0)
    assert silence.commands(fleet(OPENED), 505.0) == []
    hear(silence, 505.0, 505.25)
    assert silence.commands(fleet(OPENED), 505.3) == [CloseGateway(gateway="gw_1", code="silent")]


def test_a_gateway_has_five_seconds() -> None:
    silence = listening(100.0, 101.0)
    silence.heard_gateway(GatewayBeat(gateway="gw_1", at_ms=0), 101.0)
    hear(silence, 101.0, 106.0)
    assert silence.commands(fleet(OPENED), 106.0) == []
    hear(silence, 106.0, 106.25)
    assert silence.commands(fleet(OPENED), 106.3) == [CloseGateway(gateway="gw_1", code="silent")]


def test_nobody_is_blamed_while_no_echo_comes() -> None:
    silence = listening(100.0, 104.0)
    silence.heard_node(beat(), 104.0)
    silence.heard_gateway(GatewayBeat(gateway="gw_1", at_ms=0), 104.0)
    for second in range(105, 900):
        assert silence.commands(fleet(JOINED, OPENED), float(second)) == []


def test_the_echo_that_comes_after_a_standstill_gives_everybody_the_full_time() -> None:
    silence = listening(100.0, 104.0)
    silence.heard_node(beat(), 101.5)
    silence.heard_gateway(GatewayBeat(gateway="gw_1", at_ms=0), 100.0)
    silence.echoed(104.25, 120.0)  # they were close to their limits before
    hear(silence, 120.0, 123.0)
    assert silence.commands(fleet(JOINED, OPENED), 123.0) == []
    hear(silence, 123.0, 125.25)
    assert silence.commands(fleet(JOINED, OPENED), 125.3) == [
        NodeSilent(node="n1"),
        CloseGateway(gateway="gw_1", code="silent"),
    ]


def test_a_connection_that_was_made_anew_gives_everybody_the_full_time() -> None:
    silence = listening(100.0, 102.5)
    silence.heard_node(beat(), 100.0)
    silence.deaf(102.9)
    hear(silence, 102.9, 105.9)
    assert silence.commands(fleet(JOINED), 105.9) == []
    hear(silence, 105.9, 106.15)
    assert silence.commands(fleet(JOINED), 106.2) == [NodeSilent(node="n1")]


def test_echoes_that_are_merely_late_do_not_keep_the_dead_alive() -> None:
    silence = Silence(100.0)
    for tenth in range(0, 40, 3):  # every 0.3 s, 0.6 s late
        silence.echoed(100.1 + tenth / 10, 100.7 + tenth / 10)
    assert silence.commands(fleet(JOINED), 105.0) == [NodeSilent(node="n1")]


def test_an_outage_is_longer_than_a_busy_second() -> None:
    silence = listening(100.0, 200.0)
    assert silence.back_since(200.5) == 100.0
    assert silence.back_since(203.5) == 203.5, "it lasts"
    silence.echoed(200.25, 201.9)
    assert silence.back_since(202.0) == 100.0
    silence.echoed(202.1, 210.0)
    hear(silence, 210.0, 220.0)
    assert silence.back_since(220.0) == 210.0
