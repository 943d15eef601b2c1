"""The pages: `router` goes into the app, whose `state.stage` must be a `Stage` that is run beside it and closed with it."""

from litestar import Router
from litestar.datastructures import CacheControlHeader
from litestar.exceptions import HTTPException
from litestar.static_files import create_static_files_router

from controlplane.refusal import Refused
from web.pages.answers import said
from web.pages.history import History
from web.pages.images import operate_image
from web.pages.live import live_page, live_stream, operate
from web.pages.logs import event_document, event_page, event_pages, request_pages
from web.pages.past import past_page
from web.pages.stage import Stage
from web.pages.stories import instance_story, model_story, operation_story, request_story
from web.pages.templates import STATIC, Site

router = Router(
    "/",
    route_handlers=[
        live_page, live_stream, operate, operate_image, request_pages, event_pages, event_page, event_document, past_page,
        request_story, operation_story, model_story, instance_story,
    ],
    exception_handlers={Refused: said, HTTPException: said},
    include_in_schema=False,
)  # fmt: skip
static = create_static_files_router(
    "/static", directories=[STATIC], include_in_schema=False, name="static",
    cache_control=CacheControlHeader(max_age=31_536_000, public=True, immutable=True),
)  # fmt: skip

__all__ = ["History", "Site", "Stage", "router", "static"]
