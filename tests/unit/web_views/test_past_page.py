"""The page of the past: the drawings of the live page, of another moment, with nothing to press and nothing made up."""

import re
from collections.abc import Iterator

import pytest
from litestar import Litestar
from litestar.datastructures import State
from litestar.testing import TestClient

from controlplane.events import ImageBuilt
from controlplane.moments import utc
from controlplane.past import Moment
from tests.busyplane import busy
from tests.staged import MIB, StagedPlane
from web.pages import Site, Stage, router
from web.pages.past import steps
from web.views.figures import slug

NOW = 1_800_000_000_000


@pytest.fixture
def plane() -> StagedPlane:
    plane = busy(StagedPlane(NOW))
    plane.emit(ImageBuilt(node="n1", image="img_1", configuration="cfg_c4", size_bytes=250 * MIB))
    return plane


@pytest.fixture
def client(plane: StagedPlane) -> Iterator[TestClient[Litestar]]:
    stage = Stage(plane, plane, plane, plane, Site("http://house:8080", "$TOKEN"))
    stage.painter.recent.refill(plane.events)
    with TestClient(Litestar([router], state=State({"stage": stage}), openapi_config=None)) as client:
        yield client


def last(plane: StagedPlane, kind: str) -> int:
    return next(r.position for r in reversed(plane.events) if r.type == kind)


def test_it_says_which_past_it_is_and_never_that_it_is_live(client: TestClient[Litestar], plane: StagedPlane) -> None:
    position = last(plane, "InstanceUp")
    answer = client.get(f"/past?at={position}")
    at_ms = plane.events[position - 1].at_ms
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert f"as it was after event {position}, {utc(at_ms)}</h1>" in answer.text
    assert f'data-now="{at_ms}" data-still' in answer.text, "ages are counted up to then"
    assert '<span role="status">the past</span>' in answer.text and '<span role="status">live</span>' not in answer.text
    assert "data-still" not in client.get("/").text
    shown = [int(found) for found in re.findall(r'id="event-(\d+)"', answer.text)]
    assert shown[0] == position and shown == sorted(shown, reverse=True), "and no event that came later"


def test_there_is_nothing_to_press_and_nothing_that_follows(client: TestClient[Litestar]) -> None:
    live, past = client.get("/").text, client.get("/past").text
    for one in ('action="/models', 'action="/images', "hx-post", "hx-sse:connect", "data-try", "do-load-", "do-pin-"):
        assert one in live and one not in past, one
    assert re.findall(r"<form[^>]* action=\"([^\"]+)\"", past) == ["/logout", "/past"]


def test_what_only_beats_know_is_absent_and_not_zero(client: TestClient[Litestar]) -> None:
    live, past = client.get("/").text, client.get("/past").text
    for speed in ("tok/s", "tokens a second"):
        assert speed in live and speed not in past
    assert "163 MiB / 258 MiB" in live and "163 MiB / 258 MiB" not in past and "<progress" not in past
    assert "not measured" not in live and past.count("not measured") == past.count('class="device"') * 2  # drawn, and as words
    assert "sleepers and others" not in past
    assert "by its sets" in past and "by its sets" not in live


def test_it_shows_what_was_there_then(client: TestClient[Litestar], plane: StagedPlane) -> None:
    position = last(plane, "DeviceDeclared")
    early = client.get(f"/past?at={position}").text
    for words in ("There was no model.", "Nobody waited.", "There had been no request.", "cpu0"):
        assert words in early
    assert "curl" not in early, "nothing can be registered in the past"
    nothing = client.get("/past?at=1").text
    assert "There was no device." in nothing
    request = plane.request("tiny-qwen", reason="waits for a place")
    plane.end(request)
    assert f'id="wait-{slug(request)}"' not in client.get("/past").text
    assert f'id="wait-{slug(request)}"' in client.get(f"/past?at={plane.fleet.position - 1}").text


def test_events_lead_to_the_plane_as_it_was_then(client: TestClient[Litestar]) -> None:
    assert '<a href="/past?at=40">The plane then</a>' in client.get("/events/40").text
    for path in ("/", "/events?before=41", "/past?at=40"):
        text = client.get(path).text
        rows = re.findall(r'id="event-(\d+)"', text)
        assert rows and all(f'<a href="/past?at={row}">the plane then</a>' in text for row in rows)


def ways(position: int, newest: int, first: int = 1) -> list[int | None]:
    return [step.position for step in steps(Moment(position=position, at_ms=NOW, first=first, newest=newest))]


def test_steps_lead_on_to_the_ends_of_the_log() -> None:
    assert ways(500, 1_000) == [400, 490, 499, 501, 510, 600]
    assert ways(5, 1_000) == [1, 1, 4, 6, 15, 105]
    assert ways(1, 1_000) == [None, None, None, 2, 11, 101]
    assert ways(999, 1_000, first=950) == [950, 989, 998, 1_000, 1_000, 1_000]
    assert ways(1_000, 1_000) == [900, 990, 999, None, None, None]


@pytest.mark.parametrize(
    ("at", "status", "said"),
    [
        ("", 200, "as it was after event"), ("yesterday", 400, "is no moment; write a position of the log such as 4711"),
        ("0", 404, "the log begins with event 1"), ("9" * 20, 404, "its newest is"),
        ("2001-01-01T00:00Z", 404, "no event is as old as 2001-01-01 00:00:00.000 UTC"),
    ],
)  # fmt: skip
def test_a_moment_that_is_none_is_refused_with_the_field_to_try_again(
    client: TestClient[Litestar], at: str, status: int, said: str
) -> None:
    answer = client.get("/past", params={"at": at})
    assert answer.status_code == status
    assert said in answer.text and 'name="at"' in answer.text
    assert status == 200 or (f'value="{at}"' in answer.text and '<a href="/past">The newest event</a>' in answer.text)
