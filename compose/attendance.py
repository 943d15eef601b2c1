"""What `up` does once everything is started: the first token, the settings, the word that it is ready; then the watch."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import structlog

from compose import login
from compose.child import Child
from compose.directory import Directory
from compose.readiness import answers
from compose.settingsfile import Chosen
from compose.settingswatch import SettingsWatch
from compose.signs import questions
from compose.supervisor import Supervisor
from compose.watch import patience, watch_all
from controlplane import parties
from controlplane.bus import Bus
from controlplane.plane import Plane
from controlplane.refusal import Refused

READY_S: Final = 60.0
"""Until web answers; on a loaded machine imports alone take several seconds."""
POLL_S: Final = 0.02

Say = Callable[[str], None]
log = structlog.get_logger("up")


async def attend(
    plane: Plane, directory: Directory, chosen: Chosen, supervisor: Supervisor, web: Child, *, say: Say, began: float
) -> None:
    """Runs until it is cancelled. `began`: monotonic time of the start."""
    limits = patience()
    await login.first_token(plane, directory)
    bus = await Bus.connect(plane, "up", parties.OPERATOR)
    watching = asyncio.create_task(watch_all(supervisor.children, questions(plane, bus, supervisor), limits), name="watch")
    watching.add_done_callback(_unwatched)
    try:
        settings = SettingsWatch(chosen.path, bus, plane, say) if chosen.path is not None else None
        applied = await _first(settings, chosen) if settings is not None else 0
        if not await web.ready(READY_S):
            say(f"web is not ready after {READY_S:g} s; trying on. Its log ends:\n{web.last_words()}")
            await web.ready(None)
        await shown(plane, applied)
        plane.settings_due.unlink(missing_ok=True)
        say(f"ready in {time.monotonic() - began:.1f} s: {plane.web_url}  (data in {plane.data})")
        say(f"log in: {login.link(plane)}  (good once, for ten minutes)")
        if settings is not None:
            await settings.follow(chosen.seen)
        await asyncio.Event().wait()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await bus.close()


def _unwatched(watching: "asyncio.Task[None]") -> None:
    """It ends with us: what goes wrong with one child is tried again. Should it end all the same, the plane runs on."""
    if not watching.cancelled() and (error := watching.exception()) is not None:
        log.error("watch_ended", exc_info=error)


async def shown(plane: Plane, position: int) -> None:
    """Wait until web has seen this event: who is told that all is ready asks for his models at once."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(READY_S):
            while not await answers(plane.web_host, plane.web_port, f"/readyz?after={position}"):  # noqa: ASYNC110 (HTTP)
                await asyncio.sleep(POLL_S)


async def _first(watch: SettingsWatch, chosen: Chosen) -> int:
    """Apply the settings; returns the position of what came of it. A refusal is told and the plane goes on: the file can be
    mended while it runs."""
    try:
        return await watch.apply(chosen.settings)
    except (Refused, TimeoutError) as error:
        log.warning("settings_refused", path=str(watch.path), reason=repr(error))
        watch.unapplied(f"{watch.path}: {error or 'the decider does not answer; see its log'}")
    return 0
