"""The view: every event once and in order, whatever the delivery does; waiting on it costs nothing."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.envelope import Recorded
from controlplane.events import GatewayClosed, GatewayOpened, RequestAccepted, RequestCancelled
from controlplane.fleet import Fleet, Gap, fold
from web.plane_view import Change, PlaneView, Resynced


def view() -> PlaneView:
    bus: Any = SimpleNamespace(nc=SimpleNamespace(is_connected=True))
    return PlaneView(bus)


def recorded(position: int, event: Any, version: int = 1) -> Recorded:
    return Recorded(
        position=position, stream=event.stream, version=version, at_ms=position, command=f"cmd_{position}", ordinal=0,
        event=event,
    )  # fmt: skip


def opened(position: int) -> Recorded:
    return recorded(position, GatewayOpened(gateway=f"gw_{position}", host="h", pid=1))


def accepted(position: int, request: str) -> Recorded:
    event = RequestAccepted(request=request, model="m", gateway="gw_1", kind="chat", streamed=False, prompt_bytes=1)
    return recorded(position, event)


def cancelled(position: int, request: str) -> Recorded:
    event = RequestCancelled(
        request=request, model="m", kind="chat", streamed=False, accepted_ms=1, by="operator", phase="queued"
    )
    return recorded(position, event, 2)


def test_events_that_come_again_are_counted_once() -> None:
    events = [opened(n) for n in range(1, 2001)]
    chance = random.Random(1)
    followed = view()
    for event in events:
        for _ in range(chance.randint(1, 3)):
            followed.apply(event)
            followed.apply(chance.choice(events[: event.position]))
    assert followed.fleet.gateways == fold(events).gateways
    assert followed.fleet.position == 2000


async def test_a_position_that_never_comes_is_forgotten_with_its_waiter() -> None:
    followed = view()
    for deadline_s in (0.0, 0.001):
        with pytest.raises(TimeoutError):
            await followed.wait_position(10**9, deadline_s)
    assert followed._positions == []
    waiting = asyncio.create_task(followed.wait_position(1))
    await asyncio.sleep(0)
    followed.apply(opened(1))
    assert (await waiting).position == 1


def test_a_missing_event_is_noticed() -> None:
    followed = view()
    followed.apply(opened(1))
    with pytest.raises(Gap):
        followed.apply(opened(3))
    assert followed.fleet.position == 1


def test_listeners_hear_every_event_and_one_that_fails_harms_nobody() -> None:
    followed, heard = view(), list[Change]()

    def broken(_: Change) -> None:
        raise ZeroDivisionError

    with followed.listening(broken), followed.listening(heard.append):
        followed.apply(opened(1))
        followed.replace(Fleet(position=5))
    followed.apply(opened(6))
    assert heard == [opened(1), Resynced(Fleet(position=5))]


async def test_waiting_for_a_position_ends_when_it_is_reached_or_never() -> None:
    followed = view()
    waits = [asyncio.create_task(followed.wait_position(n, 5)) for n in (3, 1, 2)]
    await asyncio.sleep(0)
    for n in (1, 2, 3):
        followed.apply(opened(n))
    assert [(await wait).position >= n for wait, n in zip(waits, (3, 1, 2), strict=True)] == [True] * 3
    with pytest.raises(TimeoutError):
        await followed.wait_position(9, 0.01)
    followed.replace(Fleet(position=9))
    assert (await followed.wait_position(9, 0)).position == 9


async def test_waiting_for_a_fact() -> None:
    followed = view()
    wait = asyncio.create_task(followed.wait_for(lambda fleet: "gw_2" in fleet.gateways, 5))
    await asyncio.sleep(0)
    followed.apply(opened(1))
    followed.apply(opened(2))
    assert (await wait).position == 2


async def test_a_watch_gets_its_own_requests_events_and_its_end_at_once() -> None:
    followed, ends = view(), list[Any]()
    with followed.watching("req_a", ends.append) as watch, followed.watching("req_b", ends.append):
        followed.apply(accepted(1, "req_a"))
        followed.apply(cancelled(2, "req_a"))
        assert (await watch.next()) == accepted(1, "req_a")
        assert ends == [cancelled(2, "req_a").event]
    followed.apply(opened(3))


async def test_a_watch_learns_from_a_restarted_view_that_its_request_is_gone() -> None:
    followed, ends = view(), list[Any]()
    with followed.watching("req_a", ends.append) as watch:
        followed.replace(Fleet(position=7))  # not accepted yet: says nothing
        assert ends == []
        followed.replace(fold([accepted(1, "req_a")]))
        assert (await watch.next()).request == "req_a"  # type: ignore[union-attr]
        followed.replace(Fleet(position=9))
        assert ends == [None]


def test_places_follow_the_order_of_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("web.plane_view.PLACES_S", 0)
    followed = view()
    for n, name in enumerate(("req_b", "req_a", "req_c"), start=1):
        followed.apply(accepted(n, name))
    assert [followed.place(name) for name in ("req_a", "req_b", "req_c", "req_x")] == [2, 1, 3, None]
    followed.apply(cancelled(4, "req_b"))
    assert followed.place("req_a") == 1


def test_it_follows_only_while_the_bus_is_connected() -> None:
    followed = view()
    assert not followed.synced
    followed._set_following(True)
    assert followed.synced
    followed._bus.nc.is_connected = False  # type: ignore[misc]
    assert not followed.synced
    followed.apply(opened(1))
    followed.apply(recorded(2, GatewayClosed(gateway="gw_1", code="stopped"), 2))
