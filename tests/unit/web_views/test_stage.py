"""The stage fills what is recent from the log, however late the log answers."""

import asyncio
from collections.abc import Sequence

import pytest

from controlplane.envelope import Recorded
from controlplane.refusal import Code, Refused
from tests.busyplane import busy
from tests.staged import StagedPlane
from web.pages.stage import Stage
from web.pages.templates import Site
from web.plane_view import Resynced

NOW = 1_800_000_000_000


class Unsteady(StagedPlane):
    """Its history is away at first."""

    away = 1
    why: Exception = Refused(Code.UNAVAILABLE, "the log can't be read now", retry_after_ms=2000)

    async def page_of_ended(
        self, *, before: int | None, limit: int, model: str | None = None, outcome: str | None = None
    ) -> Sequence[Recorded]:
        if self.away:
            self.away -= 1
            raise self.why
        return await super().page_of_ended(before=before, limit=limit, model=model, outcome=outcome)


@pytest.mark.parametrize("why", [Unsteady.why, ValueError("a fault of ours")])
async def test_the_lists_fill_in_once_the_log_answers_and_again_after_a_gap(why: Exception) -> None:
    plane = busy(Unsteady(NOW))
    plane.why = why
    stage = Stage(plane, plane, plane, plane, Site("http://house"))
    running = asyncio.create_task(stage.run())
    try:
        async with asyncio.timeout(20):
            while not stage.painter.recent.ended_requests():
                await asyncio.sleep(0.01)
        before = len(stage.painter.recent.ended_requests())
        with pytest.MonkeyPatch.context() as unseen:
            unseen.setattr(plane, "tell", lambda change: None)
            plane.end(plane.request("tiny-qwen", instance="ins_01JDXB4M9S7QKC2W5T8C"))
        plane.tell(Resynced(plane.fleet))
        async with asyncio.timeout(20):
            while len(stage.painter.recent.ended_requests()) == before:
                await asyncio.sleep(0.01)
    finally:
        stage.close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
