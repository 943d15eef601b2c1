"""The plane as it was: the live page's drawings of a state that was folded from the log, and the ways on from there."""

from typing import Any, Final

import msgspec
from litestar import Request, Response, get
from litestar.params import FromQuery

from controlplane.moments import EXAMPLES, When, as_it_was, when
from controlplane.past import Moment
from controlplane.refusal import Code, Refused
from web.errors import STATUS
from web.pages.answers import again_s, page, stage_of
from web.pages.history import newest
from web.views.devicenames import names_of
from web.views.events import row
from web.views.recent import Recent
from web.views.scene import event_list, past_scene, request_log

STEPS: Final = (100, 10, 1)


class Step(msgspec.Struct, frozen=True):
    """A way on, and the position where it leads; None: nowhere."""

    words: str
    position: int | None


@get("/past", include_in_schema=False)
async def past_page(request: Request[Any, Any, Any], at: FromQuery[str] = "") -> Response[str]:
    stage = stage_of(request)
    try:
        moment = await stage.past.moment(_meant(at))
        fleet = await stage.past.fleet(moment)
        events = await newest(stage.history, before=moment.position + 1)
    except Refused as refused:
        told = {"moment": None, "asked": at, "refused": refused, "examples": EXAMPLES}
        return page(stage, "past.html", here="past", status=STATUS[refused.code], retry_s=again_s(refused), **told)
    recent = Recent()
    recent.refill(events)
    last = next(r for r in events if r.position == moment.position)
    return page(
        stage, "past.html", here="past", now_ms=moment.at_ms, still=True, moment=moment, asked=str(moment.position),
        words=as_it_was(moment.position, moment.at_ms), last=row(last, names_of(fleet)), scene=past_scene(fleet, recent),
        log=request_log(fleet, recent), events=event_list(fleet, recent), steps=steps(moment), examples=EXAMPLES,
    )  # fmt: skip


def _meant(at: str) -> When | None:
    """Raises Refused."""
    try:
        return when(at) if at.strip() else None
    except ValueError as error:
        raise Refused(Code.INVALID, str(error)) from error


def steps(moment: Moment) -> tuple[Step, ...]:
    """From far back to far on; one that would lead out of the log leads to its end."""
    found = []
    for by in (*(-n for n in STEPS), *reversed(STEPS)):
        position = min(max(moment.position + by, moment.first), moment.newest)
        found.append(Step(f"{abs(by)} {'earlier' if by < 0 else 'later'}", position if position != moment.position else None))
    return tuple(found)
