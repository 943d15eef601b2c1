"""Pages over the log: requests, events, one event, one operation."""

from collections.abc import Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from litestar import Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.params import FromPath, FromQuery, QueryParameter
from markupsafe import escape

from controlplane.envelope import Recorded
from controlplane.events import BY_NAME
from web.pages.answers import html, page, stage_of
from web.views.devicenames import names_of, stream_meant, stream_words
from web.views.eventfilters import wrong_stream, wrong_type
from web.views.events import document, row
from web.views.requests import OUTCOMES, ended, opened

PAGE: Final = 50
Before = Annotated[int | None, QueryParameter(name="before", ge=1, le=2**62)]


def pages(path: str, rows: Sequence[Recorded], before: int | None, **kept: str) -> dict[str, Any]:
    """Links to the newest and the next older page, keeping the filters."""
    asked = {name: value for name, value in kept.items() if value}
    older = f"{path}?{urlencode({**asked, 'before': rows[PAGE - 1].position})}" if len(rows) > PAGE else ""
    return {"before": before, "newest": f"{path}?{urlencode(asked)}" if asked else path, "older": older}


@get("/requests", include_in_schema=False)
async def request_pages(
    request: Request[Any, Any, Any], model: FromQuery[str] = "", outcome: FromQuery[str] = "", before: Before = None
) -> Response[str]:
    stage = stage_of(request)
    fleet = stage.sight.fleet
    found: Sequence[Recorded] = ()
    if outcome in ("", *OUTCOMES):
        found = await stage.history.page_of_ended(before=before, limit=PAGE + 1, model=model or None, outcome=outcome or None)
    rows = [found_row for recorded in found[:PAGE] if (found_row := ended(recorded)) is not None]
    if before is None and outcome not in OUTCOMES:
        open_rows = (opened(r) for r in sorted(fleet.requests.values(), key=lambda r: -r.order))
        rows = [r for r in open_rows if model in ("", r.model) and outcome in ("", r.outcome)][:PAGE] + rows
    names = sorted({*fleet.models, *([model] if model else [])})
    return page(
        stage, "requests.html", here="requests", rows=rows, names=names, model=model, outcome=outcome,
        outcomes=("running", "queued", *OUTCOMES), **pages("/requests", found, before, model=model, outcome=outcome),
    )  # fmt: skip


@get("/events", include_in_schema=False)
async def event_pages(
    request: Request[Any, Any, Any],
    stream: FromQuery[str] = "",
    kind: Annotated[str, QueryParameter(name="type")] = "",
    aggregate: FromQuery[str] = "",
    before: Before = None,
) -> Response[str]:
    stage = stage_of(request)
    names = names_of(stage.sight.fleet)
    meant = stream_meant(stream.strip(), names)
    wrong = (wrong_type(kind) if kind else None) or (wrong_stream(meant) if meant else None)
    types = sorted(name for name, event in BY_NAME.items() if not aggregate or aggregate == event.AGGREGATE)
    found: Sequence[Recorded] = ()
    if not wrong:
        found = await stage.history.page_of_events(
            before=before, limit=PAGE + 1, stream=meant or None, type=kind or None,
            types=tuple(types) if aggregate and not kind else None,
        )  # fmt: skip
    return page(
        stage, "events.html", here="events", rows=[row(r, names) for r in found[:PAGE]], types=types, type=kind,
        stream=stream_words(meant, names), aggregate=aggregate,
        nothing=f"No event matches: {wrong}." if wrong else "Nothing older." if before else "No event matches.",
        **pages("/events", found, before, stream=meant, type=kind, aggregate=aggregate),
    )  # fmt: skip


async def _event(request: Request[Any, Any, Any], position: int) -> Recorded:
    newest = stage_of(request).sight.fleet.position
    found = await stage_of(request).history.page_of_events(before=position + 1, limit=1) if 0 < position < 2**62 else ()
    if not found or found[0].position != position:
        raise NotFoundException(f"There is no event {position}; the newest is {newest}.")
    return found[0]


@get("/events/{position:int}", include_in_schema=False)
async def event_page(request: Request[Any, Any, Any], position: FromPath[int]) -> Response[str]:
    recorded = await _event(request, position)
    stage = stage_of(request)
    shown = row(recorded, names_of(stage.sight.fleet))
    return page(stage, "event.html", here="events", row=shown, document=document(recorded))


@get("/events/{position:int}/document", include_in_schema=False)
async def event_document(request: Request[Any, Any, Any], position: FromPath[int]) -> Response[str]:
    """The event's JSON, for the list that opens it in place."""
    text = document(await _event(request, position))
    return html(f'<pre class="json" tabindex="0">{escape(text)}</pre>')
