"""The painter: when something changed it compares what the page should show with what it last sent, and draws the difference.

Comparing views (a few hundred small values) instead of tracking which event touches which fragment makes a missed
update impossible: what is shown is always a function of the newest state.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import Final, Protocol

import msgspec
import structlog

from controlplane.envelope import Recorded
from web.live.frame import partial
from web.live.hub import Hub
from web.live.sight import Sight
from web.plane_view import Resynced
from web.views.figures import slug
from web.views.plane import Link
from web.views.recent import Recent
from web.views.scene import Scene, event_list, request_log, scene
from web.views.slots import Held, layout

_log = structlog.get_logger(__name__)

FRAME_S: Final = 0.1
"""At most ten frames a second: faster than that nobody reads."""
LOG_S: Final = 0.5
"""The request log and the event list are long; twice a second is as live as a list can be read."""


LOOK_S: Final = 1.0
SILENCE_S: Final = 3.0
"""Nodes beat once a second; the desk calls one silent after as long."""


class Draw(Protocol):
    """Render one fragment: the name of its template and its view, to HTML whose root has the fragment's id."""

    def __call__(self, template: str, view: object) -> str: ...


class Fragment(msgspec.Struct, frozen=True):
    """Drawn again when `key` has changed; `parent`: the fragment that contains it, with which it is drawn as well."""

    template: str
    view: object
    key: object
    parent: str = ""


def fragments(shown: Scene) -> dict[str, Fragment]:
    """What is drawn as it happens, by element id, as small as it changes: what contains others has a key without them."""
    found = {
        "plane": Fragment("plane", shown.head, shown.head),
        "slots": Fragment("slots", shown.devices, tuple(d.device for d in shown.devices)),
        "pools": Fragment("pools", shown.pools, tuple(p.node for p in shown.pools)),
        "waiters": Fragment("waiters", shown.waiters, shown.waiters),
        "models": Fragment("models", shown.models, tuple(m.model for m in shown.models)),
    }
    for device in shown.devices:
        name = slug(device.device)
        found[f"device-{name}"] = Fragment("device", device, layout(device), "slots")
        found[f"bytes-{name}"] = Fragment("bytes", device, device.segments, f"device-{name}")
        for run in device.runs:
            if isinstance(run, Held):
                found[f"grant-{run.grant}"] = Fragment("held", run, run, f"device-{name}")
    for pool in shown.pools:
        found[f"pool-{slug(pool.node)}"] = Fragment("pool", pool, pool, "pools")
    for model in shown.models:
        found[f"model-{slug(model.model)}"] = Fragment("model", model, model, "models")
    return found


def _contained(name: str, among: Mapping[str, Fragment], drawn: Collection[str]) -> bool:
    """Whether something that contains the fragment is drawn."""
    while (name := among[name].parent) != "":
        if name in drawn:
            return True
    return False


class Painter:
    """Follows a sight and keeps a hub's fragments true."""

    def __init__(self, sight: Sight, hub: Hub, draw: Draw, recent: Recent | None = None) -> None:
        self.sight, self.hub, self.recent = sight, hub, recent or Recent()
        self._draw = draw
        self._shown: dict[str, object] = {}
        self._lists: dict[str, object] = {}
        self._lists_at = 0.0
        self._changed = asyncio.Event()
        self._heard_at = monotonic()
        self.resynced: Callable[[], None] | None = None
        """Called when events were skipped: whoever can read the log fills `recent` again."""

    def noticed(self, change: object) -> None:
        """Take in a change of the sight. Quick: it only marks."""
        if isinstance(change, Recorded):
            self.recent.add(change)
        elif isinstance(change, Resynced) and self.resynced is not None:
            self.resynced()
        self._heard_at = monotonic()
        self._changed.set()

    @property
    def link(self) -> Link:
        if not self.sight.synced:
            return Link.DISCONNECTED
        silent = self.sight.fleet.nodes and monotonic() - self._heard_at > SILENCE_S
        lagging = silent or self.sight.behind_s > SILENCE_S
        return Link.LAGGING if lagging else Link.LIVE

    def scene(self) -> Scene:
        return scene(self.sight.fleet, self.sight.beats, self.link, self.recent)

    async def run(self) -> None:
        """Paint for ever, at most every `FRAME_S`, and only while somebody looks."""
        with self.sight.listening(self.noticed):
            while True:
                await self.hub.watched()
                with contextlib.suppress(TimeoutError):  # that nothing is heard is news as well
                    async with asyncio.timeout(LOOK_S):
                        await self._changed.wait()
                self._changed.clear()
                try:
                    if self.paint():
                        self._changed.set()
                except Exception:
                    _log.exception("live.paint", position=self.sight.fleet.position)
                await asyncio.sleep(FRAME_S)

    def paint(self, *, all_lists: bool = False) -> bool:
        """Publish what differs from the last frame, if anything does. True: a list was put off and is due soon."""
        shown = self.scene()
        wanted = fragments(shown)
        changed = {name for name, fragment in wanted.items() if self._shown.get(name) != fragment.key}
        outermost = [name for name in changed if not _contained(name, wanted, changed)]
        pieces = {name: partial(name, self._draw(wanted[name].template, wanted[name].view)) for name in outermost}
        late = self._paint_lists(pieces, all_lists)
        # what was drawn as a part of something larger has no piece of its own until it changes alone
        gone = [name for name in self._shown if name not in wanted or _contained(name, wanted, changed)]
        self._shown = {name: fragment.key for name, fragment in wanted.items()}
        if pieces or gone:
            self.hub.publish(pieces, gone)
        return late

    def _paint_lists(self, pieces: dict[str, bytes], now: bool) -> bool:
        if not now and monotonic() - self._lists_at < LOG_S:
            return True
        self._lists_at = monotonic()
        views: dict[str, object] = {
            "requests": request_log(self.sight.fleet, self.recent), "events": event_list(self.sight.fleet, self.recent),
        }  # fmt: skip
        for name, view in views.items():
            if self._lists.get(name) != view:
                self._lists[name] = view
                pieces[name] = partial(name, self._draw(name, view))
        return False
