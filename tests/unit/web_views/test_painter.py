"""The painter draws what differs, once, and nothing else."""

import asyncio

import pytest

from controlplane.events import ModelCleared, ModelRetired
from tests.busyplane import busy, measured
from tests.staged import StagedPlane
from web.live.hub import Hub
from web.live.painter import Painter
from web.pages.templates import Site, Templates

NOW = 1_800_000_000_000


def stage() -> tuple[StagedPlane, Painter, list[str]]:
    plane, drawn = busy(StagedPlane(NOW)), list[str]()
    templates = Templates(Site("http://house"))

    def draw(template: str, view: object) -> str:
        drawn.append(template)
        return templates.draw(template, view)

    painter = Painter(plane, Hub(), draw)
    painter.paint(all_lists=True)
    drawn.clear()
    return plane, painter, drawn


def test_nothing_changed_is_no_frame() -> None:
    _, painter, drawn = stage()
    before = painter.hub.seq
    painter.paint(all_lists=True)
    assert (drawn, painter.hub.seq) == ([], before)


def test_only_what_changed_is_drawn() -> None:
    plane, painter, drawn = stage()
    plane.beat(measured(plane, done=200 << 20))
    painter.paint()
    assert sorted(drawn) == ["held", "model"]
    drawn.clear()
    plane.emit(ModelCleared(model="sql-coder"))
    painter.paint()
    assert sorted(drawn) == ["model", "plane"]


def test_a_run_that_is_granted_is_drawn_with_its_device_and_later_alone() -> None:
    plane, painter, drawn = stage()
    plane.instance("ins_new", "cfg_c4")
    number = plane.climb("ins_new", "sql-coder", "dev-n1-cpu0", 4, 4)
    painter.paint()
    assert sorted(drawn) == ["device", "model", "plane"]
    drawn.clear()
    plane.up("ins_new", weight_set="ws_1")
    painter.paint()
    assert sorted(drawn) == ["bytes", "held", "model", "plane"]
    assert b'<hx-partial id="grant-%d"' % (number - 1) in painter.hub.frame(painter.hub.seq - 1)


def test_a_list_is_drawn_whole_when_a_member_goes_and_its_members_are_forgotten() -> None:
    plane, painter, drawn = stage()
    plane.beat(measured(plane, tokens_per_s=3))
    painter.paint()
    drawn.clear()
    plane.emit(ModelRetired(model="whale-70b"))
    painter.paint()
    assert sorted(drawn) == ["models", "plane"]
    assert b"whale-70b" not in painter.hub.frame(-1).replace(b"whale-70b needs", b"")


def test_a_reader_from_the_start_ends_with_the_same_as_one_from_now() -> None:
    plane, painter, _ = stage()
    start = painter.hub.seq
    plane.beat(measured(plane, tokens_per_s=3))
    painter.paint()
    plane.emit(ModelRetired(model="whale-70b"))
    painter.paint()
    late, whole = painter.hub.frame(start), painter.hub.frame(-1)
    assert b'<hx-partial id="models"' in late
    assert len(late) < len(whole)


def test_long_lists_wait_their_turn() -> None:
    plane, painter, drawn = stage()
    plane.request("smollm2-135m", instance="ins_01JDXB4M9S7QKC2W5T8A")
    assert painter.paint() is True
    assert "requests" not in drawn
    painter.paint(all_lists=True)
    assert "requests" in drawn


async def test_it_paints_by_itself_only_while_somebody_looks() -> None:
    plane, painter, drawn = stage()
    running = asyncio.create_task(painter.run())
    try:
        await asyncio.sleep(0)
        plane.beat(measured(plane, tokens_per_s=7))
        for _ in range(20):
            await asyncio.sleep(0)
        assert drawn == []
        reader = painter.hub.join(painter.hub.mark)
        async with asyncio.timeout(20):
            frame = await painter.hub.next(reader)
        assert frame is not None
        assert b'<hx-partial id="grant-' in frame
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_a_page_to_which_beats_come_and_written_events_do_not_is_not_live() -> None:
    _, painter, _ = stage()
    painter.sight.behind_s = 1.0  # type: ignore[misc]
    assert painter.scene().head.words == "live", "a moment is nothing"
    painter.sight.behind_s = 4.0  # type: ignore[misc]
    assert painter.scene().head.words.startswith("lagging")


async def test_silence_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, painter, _ = stage()
    assert painter.scene().head.words == "live"
    monkeypatch.setattr("web.live.painter.SILENCE_S", 0.0)
    assert painter.scene().head.words.startswith("lagging")
    painter.sight.synced = False  # type: ignore[misc]
    assert painter.scene().head.words == "disconnected from the log"
