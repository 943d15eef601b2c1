"""Everything the live page shows at one moment, as values that can be compared: what differs is drawn again."""

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from controlplane.fleet import Fleet
from controlplane.subjects import NodeBeat
from web.views.devicenames import names_of
from web.views.events import EventRow
from web.views.models import ModelRow, models
from web.views.plane import Link, PlaneHead, plane
from web.views.pool import PoolView, pools
from web.views.recent import Recent
from web.views.requests import RequestRow, opened
from web.views.slots import DeviceView, devices
from web.views.waiters import WaitersView, waiters

RUNNING_SHOWN = 25
"""Open requests at the head of the log; a fuller plane is told by the counters in the page's head."""


class RequestLog(msgspec.Struct, frozen=True):
    open: tuple[RequestRow, ...]
    ended: tuple[RequestRow, ...]
    models: tuple[str, ...]


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    head: PlaneHead
    devices: tuple[DeviceView, ...]
    pools: tuple[PoolView, ...]
    waiters: WaitersView
    models: tuple[ModelRow, ...]


def scene(fleet: Fleet, beats: Mapping[str, NodeBeat], link: Link, recent: Recent) -> Scene:
    """What is drawn as it happens."""
    return Scene(
        head=plane(fleet, beats, link), devices=devices(fleet, beats), pools=pools(fleet, beats), waiters=waiters(fleet),
        models=models(fleet, beats, recent.failures),
    )  # fmt: skip


def past_scene(fleet: Fleet, recent: Recent) -> Scene:
    """What was to be seen then: without what only beats knew, and nothing can be done about it any more."""
    shown = scene(fleet, {}, Link.PAST, recent)
    pools = (replace(pool, images=tuple(replace(image, actions=()) for image in pool.images)) for pool in shown.pools)
    return replace(shown, pools=tuple(pools), models=tuple(replace(model, actions=()) for model in shown.models))


def request_log(fleet: Fleet, recent: Recent) -> RequestLog:
    """The newest open requests, then the last that ended."""
    running = sorted(fleet.requests.values(), key=lambda r: -r.order)[:RUNNING_SHOWN]
    names = tuple(sorted(m.model for m in fleet.models.values() if not m.retired))
    return RequestLog(tuple(opened(r) for r in running), recent.ended_requests(), names)


def event_list(fleet: Fleet, recent: Recent) -> tuple[EventRow, ...]:
    return recent.events(names_of(fleet))
