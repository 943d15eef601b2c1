"""Requests, waiters, events and what is recent."""

import typing

import msgspec
import pytest

from controlplane.envelope import Recorded
from controlplane.events import AnyEvent, GrantGiven, InstanceUp, RequestCancelled
from tests.busyplane import busy
from tests.staged import StagedPlane
from web.views import figures
from web.views.devicenames import names, names_of, stream_meant, stream_words
from web.views.events import document, row
from web.views.plane import Link
from web.views.plane import plane as head
from web.views.pool import pools
from web.views.recent import ENDED_KEPT, OTHERS_KEPT, REQUEST_EVENTS_KEPT, Recent
from web.views.requests import ended, opened
from web.views.scene import request_log
from web.views.sentences import sentence
from web.views.waiters import SHOWN, waiters

NOW = 1_800_000_000_000


def test_waiters_are_in_order_with_place_and_reason() -> None:
    view = waiters(busy(StagedPlane(NOW)).fleet)
    assert [(w.place, w.model, w.reason) for w in view.shown] == [
        (1, "smollm2-sailor", "smollm2-sailor is on its way up: map weights"),
        (2, "sql-coder", "sql-coder backs off after 3 failed starts"),
    ]


def test_a_long_queue_is_cut_and_counted() -> None:
    plane = busy(StagedPlane(NOW))
    for place in range(40):
        plane.request("sql-coder", reason="waits", place=place)
    view = waiters(plane.fleet)
    assert (len(view.shown), view.total) == (SHOWN, 42)


def test_a_row_holds_all_that_an_ended_request_shows() -> None:
    plane = busy(StagedPlane(NOW))
    rows = [found for r in plane.events if (found := ended(r)) is not None]
    assert {r.outcome for r in rows} == {"finished", "failed", "cancelled"}
    wrong = next(r for r in rows if r.outcome == "failed")
    assert (wrong.reason, wrong.message) == ("engine_died", "its engine ended while it was answering")
    assert (wrong.prompt_tokens, wrong.completion_tokens, wrong.first_token_ms) == (52, 128, 38)
    running = next(opened(r) for r in plane.fleet.requests.values() if r.instance)
    assert (running.outcome, running.queued_ms, running.took_ms) == ("running", 0, None)


@pytest.mark.parametrize(
    ("by", "phase", "known"),
    [("caller", "running", True), ("operator", "queued", True), ("operator", "running", False), ("gateway", "running", False)],
)
def test_tokens_that_nobody_had_counted_are_not_told_as_none(by: str, phase: str, known: bool) -> None:
    plane = busy(StagedPlane(NOW))
    told = {"kind": "chat", "streamed": True, "accepted_ms": NOW, "completion_tokens": 3 if by == "caller" else 0}
    request = plane.request("tiny-qwen", reason="waits for a place")
    event = plane.emit(RequestCancelled(request=request, model="tiny-qwen", by=by, phase=phase, **told))
    shown = ended(event)
    assert shown is not None and (shown.prompt_tokens is None, shown.completion_tokens is None) == (not known, not known)
    assert ("tokens" in sentence(event.event)) == known


def test_the_log_is_open_requests_first_and_newest_first() -> None:
    plane, recent = busy(StagedPlane(NOW)), Recent()
    recent.refill(plane.events)
    log = request_log(plane.fleet, recent)
    assert [r.outcome for r in log.open] == ["queued", "queued", "running", "running"]
    assert [r.position for r in log.ended] == sorted((r.position for r in log.ended), reverse=True)


def test_recent_is_bounded_and_request_events_push_out_nothing_else() -> None:
    plane, recent = busy(StagedPlane(NOW)), Recent()
    recent.refill(plane.events)
    before = [e.position for e in recent.events({}) if e.aggregate != "request"]
    for _ in range(300):
        request = plane.request("smollm2-135m", instance="ins_01JDXB4M9S7QKC2W5T8A")
        plane.end(request)
        for recorded in plane.events[-3:]:
            recent.add(recorded)
    assert [e.position for e in recent.events({}) if e.aggregate != "request"] == before
    assert len(recent.ended_requests()) == ENDED_KEPT
    assert len(recent.events({})) <= OTHERS_KEPT + REQUEST_EVENTS_KEPT


def test_an_event_seen_twice_or_late_counts_once() -> None:
    plane, once, twice = busy(StagedPlane(NOW)), Recent(), Recent()
    for recorded in plane.events:
        once.add(recorded)
        twice.add(recorded)
        twice.add(recorded)
    twice.refill(plane.events[-10:])
    assert twice.events({}) == once.events({})
    assert twice.ended_requests() == once.ended_requests()


def test_refilling_puts_older_ends_behind_what_arrived_meanwhile() -> None:
    plane, recent = busy(StagedPlane(NOW)), Recent()
    recent.add(plane.events[-1])
    recent.refill(plane.events)
    assert recent.position == plane.events[-1].position
    assert len(recent.ended_requests()) == 24


@pytest.mark.parametrize("kind", typing.get_args(AnyEvent), ids=lambda kind: str(kind.__name__))
def test_every_event_has_a_sentence(kind: type[AnyEvent]) -> None:
    # convert fills each field with a value of its type: zeros, empty texts, first members
    event = msgspec.convert(_sample(kind), kind)
    assert isinstance(sentence(event), str)
    recorded = Recorded(position=1, stream=event.stream, version=1, at_ms=NOW, command="cmd_1", ordinal=0, event=event)
    assert row(recorded, {}).type == kind.__name__
    assert f'"type": "{kind.__name__}"' in document(recorded)


def test_devices_go_by_their_names_and_are_found_by_them() -> None:
    plane, recent = busy(StagedPlane(NOW)), Recent()
    recent.refill(plane.events)
    shown = [one for one in recent.events(names_of(plane.fleet)) if one.type == "GrantGiven"]
    assert {one.stream for one in shown} == {"device:dev-n1-cpu0", "device:dev-n1-cpu1"}, "as programs have it"
    assert {one.stream_words for one in shown} == {"device:cpu0", "device:cpu1"}
    assert all(one.text.startswith(f"{one.stream_words.removeprefix('device:')}: ins ") for one in shown), shown
    known = names([("id-1", "n1", "cpu0"), ("id-2", "n2", "cpu0"), ("id-3", "n1", "cpu1")])
    assert known == {"id-1": "n1/cpu0", "id-2": "n2/cpu0", "id-3": "cpu1"}
    for device, name in known.items():
        assert stream_words(f"device:{device}", known) == f"device:{name}"
        assert stream_meant(f"device:{name}", known) == stream_meant(f"device:{device}", known) == f"device:{device}"
    assert stream_meant("model:cpu1", known) == stream_words("model:cpu1", known) == "model:cpu1"
    assert stream_words("device:gone", known) == stream_meant("device:gone", known) == "device:gone"


@pytest.mark.parametrize(("cells", "words"), [(8, "holds a whole device"), (2, "holds ¼ of a device, from cell 4")])
def test_a_grant_says_what_part_of_a_device_it_is(cells: int, words: str) -> None:
    given = msgspec.convert(_sample(GrantGiven) | {"cells": cells, "offset": 0 if cells == 8 else 4}, GrantGiven)
    assert sentence(given).endswith(words)


def _sample(kind: type[msgspec.Struct]) -> dict[str, object]:
    return {f.encode_name: _value(f.type) for f in msgspec.structs.fields(kind) if f.required}


def _value(kind: object) -> object:
    match msgspec.inspect.type_info(typing.cast("type", kind)):
        case msgspec.inspect.StrType():
            return "x"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            return 1
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.EnumType(cls=cls):
            return next(iter(cls)).value
        case msgspec.inspect.StructType(cls=cls):
            return _sample(cls)
        case msgspec.inspect.DictType():
            return {}
        case _:
            return []


def test_the_pool_tells_sets_sharers_and_sleepers() -> None:
    plane = busy(StagedPlane(NOW))
    (view,) = pools(plane.fleet, plane.beats)
    assert (view.used_bytes, view.width) == (527 << 20, 51.46)
    assert {s.models: s.mapped for s in view.sets} == {
        ("smollm2-sailor",): False, ("tiny-qwen",): True, ("smollm2-135m",): True,
    }  # fmt: skip
    assert [(s.instance, s.model) for s in view.sleepers] == [("ins_01JDXB4M9S7QKC2W5T8D", "tiny-qwen")]
    plane.beats.clear()
    (unmeasured,) = pools(plane.fleet, plane.beats)
    assert (unmeasured.measured, unmeasured.used_bytes) == (False, 527 << 20)


def test_the_head_says_how_the_page_stands_to_the_log() -> None:
    plane = busy(StagedPlane(NOW))
    shown = head(plane.fleet, plane.beats, Link.LIVE)
    assert (shown.tone, shown.position, shown.epoch, shown.running, shown.waiting) == ("up", plane.fleet.position, 3, 2, 2)
    assert head(plane.fleet, plane.beats, Link.DISCONNECTED).words == "disconnected from the log"
    assert head(plane.fleet, plane.beats, Link.LAGGING).words.startswith("lagging")
    assert head(StagedPlane(NOW).fleet, {}, Link.DISCONNECTED).words == "connecting to the log"


def test_figures_are_written_for_people() -> None:
    assert [figures.span(v) for v in (None, 0, 41, 1340, 125_000, 11_400_000)] == [
        "–", "0 ms", "41 ms", "1.3 s", "2 min 5 s", "3 h 10 min",
    ]  # fmt: skip
    assert figures.count(1_234_567) == "1\u202f234\u202f567"
    assert figures.share(2) == "¼"
    assert figures.iso(NOW) == "2027-01-15T08:00:00.000Z"


def test_ids_of_elements_are_fit_for_selectors_and_stay_apart() -> None:
    names = ["a.b", "a_b", "a-b", "a b", 'a"b', "a_2e_b", "ä", "<x>"]
    slugs = [figures.slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    assert all(c.isascii() and (c.isalnum() or c in "-_") for slug in slugs for c in slug)


@pytest.mark.parametrize(
    ("graphs", "again", "said"),
    [(70, 0, ", none of 70 CUDA graphs captured again"), (35, 3, ", 3 of 35 CUDA graphs captured again"), (None, 0, " used")],
)
def test_graphs_that_were_captured_again_are_told_with_the_wake(graphs: int | None, again: int, said: str) -> None:
    up = InstanceUp(
        node="n1", instance="ins_1", directive=1, model="a", revision=1, weight_set="ws_1", grant=1, endpoint="http://here",
        pid=1, took_ms=1, bytes_mapped=0, bytes_used=0, graphs=graphs, graphs_again=again,
    )  # fmt: skip
    assert sentence(up).endswith(said)
