"""Reports: the same one is the same command; they arrive, in order, or are refused for good."""

import asyncio

import pytest

from controlplane.answer import Answer, Done
from controlplane.commands import Order, ReportEnded, ReportFailed, ReportSlept, ReportUp
from controlplane.refusal import Code, Refused
from controlplane.rungs import Rung
from worker import report
from worker.report import Reporter


class Plane:
    """Answers as told; then takes everything."""

    def __init__(self, *refusals: Code) -> None:
        self.refusals = list(refusals)
        self.orders: list[Order] = []

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer:
        assert subject == "cmd.node.n1.report"
        self.orders.append(order)
        await asyncio.sleep(0)
        if self.refusals:
            raise Refused(self.refusals.pop(0), "no")
        return Done(position=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "FIRST_WAIT_S", 0.001)


def up(directive: int, *, took_ms: int = 1, endpoint: str = "http://127.0.0.1:1") -> ReportUp:
    return ReportUp(
        node="n1", instance="ins_1", directive=directive, model="m", revision=1, weight_set="ws", grant=1, endpoint=endpoint,
        pid=7, took_ms=took_ms, bytes_mapped=1, bytes_used=2,
    )  # fmt: skip


def slept(directive: int) -> ReportSlept:
    return ReportSlept(node="n1", instance="ins_1", directive=directive, pid=7, took_ms=1, bytes_used=1)


async def sent(plane: Plane, *bodies: report.Report) -> list[Order]:
    reporter = Reporter(plane, "n1")
    for body in bodies:
        reporter.report(body)
    async with asyncio.timeout(20):
        while reporter.waiting:
            await asyncio.sleep(0.001)
    await reporter.close()
    return plane.orders


async def test_the_same_report_is_the_same_command_however_long_it_took() -> None:
    first = await sent(Plane(), up(5))
    again = await sent(Plane(), up(5, took_ms=99))
    assert first[0].id == again[0].id
    assert first[0].id.startswith("cmd_")


async def test_reports_of_other_directives_kinds_or_places_are_other_commands() -> None:
    ended = ReportEnded(node="n1", instance="ins_1", directive=5, took_ms=1)
    failed = ReportFailed(node="n1", instance="ins_1", directive=5, rung=Rung.UP, step="s", code="c", message="m")
    orders = await sent(Plane(), up(5), up(6), up(5, endpoint="http://127.0.0.1:2"), slept(5), ended, failed)
    assert len({order.id for order in orders}) == 6


async def test_a_report_is_sent_until_the_plane_answers() -> None:
    orders = await sent(Plane(Code.UNAVAILABLE, Code.UNAVAILABLE), up(5))
    assert len(orders) == 3
    assert len({order.id for order in orders}) == 1


class Faulty(Plane):
    """Fails once in a way that nobody thought of."""

    async def command(self, subject: str, order: Order, *, timeout_s: float = 5.0) -> Answer:
        if not self.orders:
            self.orders.append(order)
            raise ValueError("not thought of")
        return await super().command(subject, order)


async def test_a_fault_holds_up_neither_a_report_nor_those_behind_it() -> None:
    orders = await sent(Faulty(), up(5), slept(6))
    assert [type(order.body) for order in orders] == [ReportUp, ReportUp, ReportSlept]


async def test_a_stale_report_is_not_sent_again_and_the_next_one_is() -> None:
    orders = await sent(Plane(Code.STALE), up(5), slept(6))
    assert [type(order.body) for order in orders] == [ReportUp, ReportSlept]


async def test_reports_of_one_instance_keep_their_order_while_the_plane_is_away() -> None:
    orders = await sent(Plane(Code.UNAVAILABLE, Code.UNAVAILABLE), up(5), slept(6))
    assert [type(order.body) for order in orders] == [ReportUp, ReportUp, ReportUp, ReportSlept]


async def test_a_report_that_waits_already_is_not_queued_twice() -> None:
    assert len(await sent(Plane(), up(5), up(5), up(5))) == 1
