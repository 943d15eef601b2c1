"""What plane and pool know of weight sets, brought together."""

import asyncio
from typing import Any

import pytest
from immutables import Map

from controlplane.commands import ReportDropped
from controlplane.events import ModelCleared, ModelRegistered
from controlplane.fleet import Model
from controlplane.spec import ModelSpec
from tests.chronicle import Chronicle
from worker.board import Board
from worker.desired import Desired
from worker.failure import StepFailed
from worker.moves import Goal
from worker.report import Report
from worker.stock import STRAY_S, Stock


class Shelf:
    """A pool in which some sets are mapped."""

    def __init__(self, mapped: set[str]) -> None:
        self.mapped, self.dropped_sets = mapped, list[str]()

    async def dropped(self, weight_set: str) -> bool:
        if weight_set in self.mapped:
            return False
        self.dropped_sets.append(weight_set)
        return True


def made(*known: str, mapped: set[str] | None = None) -> tuple[Stock, Shelf, list[Report]]:
    shelf: Any = Shelf(mapped or set())
    reports: list[Report] = []
    desired = Desired(node="n1", staged=Map(dict.fromkeys(known, (("m", 1),))))
    return Stock(shelf, lambda: desired, reports.append, Board()), shelf, reports


class Closed(Shelf):
    """No source can be opened for now."""

    def __init__(self) -> None:
        super().__init__(set())
        self.tried = asyncio.Semaphore(0)

    def forget(self, goal: Goal) -> None:
        pass

    async def prepared(self, model: Model, progress: object) -> None:
        self.tried.release()
        raise StepFailed("hub_unreachable", "no route", final=False)


async def test_a_retry_does_not_wait_for_the_next_try() -> None:
    shelf: Any = Closed()
    spec = ModelSpec(name="m", source="fake:m", engine="fake")
    registered, cleared = Chronicle().record(
        ModelRegistered(model="m", spec=spec, revision=1, origin="api"), ModelCleared(model="m")
    )
    desired = Desired(node="n1").after(registered)
    reports: list[Report] = []
    kept = Stock(shelf, lambda: desired, reports.append, Board())
    async with asyncio.timeout(20):
        kept.follow()
        await shelf.tried.acquire()
        kept.follow()
        desired = desired.after(cleared)
        kept.follow()
        await shelf.tried.acquire()
    await kept.close()
    assert [(type(report).__name__, getattr(report, "final", None)) for report in reports] == [("ReportUnusable", False)] * 2


async def test_a_set_that_the_pool_has_lost_is_reported() -> None:
    kept, shelf, reports = made("ws_here", "ws_lost")
    for now_s in (0, STRAY_S):
        await kept.compare(["ws_here"], now_s)
    assert reports == [ReportDropped(node="n1", weight_set="ws_lost", code="lost")]
    assert shelf.dropped_sets == []


async def test_a_set_that_nobody_counts_is_dropped_unless_an_engine_maps_it() -> None:
    kept, shelf, reports = made("ws_here", mapped={"ws_mapped"})
    for now_s in (0, STRAY_S):
        await kept.compare(["ws_here", "ws_stray", "ws_mapped"], now_s)
    assert (shelf.dropped_sets, reports) == (["ws_stray"], [])


async def test_what_is_on_its_way_is_given_time() -> None:
    kept, shelf, reports = made("ws_lost")
    for now_s in (0, STRAY_S - 1):
        await kept.compare(["ws_new"], now_s)
    await kept.compare(["ws_lost"], STRAY_S - 1)  # the one is there again, the other is gone: both count anew
    for now_s in (STRAY_S, 2 * STRAY_S - 1):
        await kept.compare(["ws_new"], now_s)
    assert (shelf.dropped_sets, reports) == ([], [])
    await kept.compare(["ws_new"], 2 * STRAY_S)
    assert (shelf.dropped_sets, len(reports)) == (["ws_new"], 1)


async def test_a_dismissed_set_whose_leaving_meets_a_fault_of_ours_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.stock.AGAIN_S", (0.0, 0.0))
    reports, faults = list[Report](), [ValueError("a fault of ours")] * 2

    class Faulty(Shelf):
        async def dropped(self, weight_set: str) -> bool:
            if faults:
                raise faults.pop()
            return await super().dropped(weight_set)

    shelf: Any = Faulty(set())
    monkeypatch.setattr("worker.stock.RETRY_S", 0.0)
    stock = Stock(shelf, lambda: Desired(node="n1", dismissed=frozenset({"ws_1"})), reports.append, Board())
    stock.follow()
    async with asyncio.timeout(20):
        while not reports:
            await asyncio.sleep(0.005)
    assert reports == [ReportDropped(node="n1", weight_set="ws_1", code="dismissed")]
    await stock.close()
