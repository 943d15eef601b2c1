"""The settings file at run time: applied at the start and whenever it becomes another, by whatever way it was replaced."""

import asyncio
import getpass
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from msgspec import structs

from compose.node import checkpoint_bytes
from compose.settingsfile import SIZE, Stamp, stamp
from controlplane import ids
from controlplane.bus import Bus
from controlplane.commands import ApplySettings, Order
from controlplane.events import NodeLimits
from controlplane.fleet.images import idle_pins
from controlplane.plane import Plane
from controlplane.refusal import Code, Refused
from controlplane.settings import NodeSettings, Settings, SettingsError, read
from controlplane.subjects import COMMAND_OPERATOR

POLL_S: Final = 0.5
"""A look at four numbers of one file. inotify would have to follow every link on the way, and misses network mounts."""
GONE_LOOKS: Final = 6
"""Looks in a row that find no file, or nothing in it, until that is said: whoever replaces one is quicker."""
APPLY_S: Final = 30.0
KEYS: Final = {
    "pool_bytes": "[node] pool_bytes", "devices": "[node] devices", "gpus": "[node] gpus", "drain_ms": "[node] drain",
    "criu": "[node] criu", "pool_ready_bytes": "[pool] ready", "pool_helpers": "[pool] helpers",
    "pool_beside_decoding": "[pool] beside_decoding",
}  # fmt: skip
"""As the file writes them: read at a start and not again, unlike models and limits."""

log = structlog.get_logger("settings")


class SettingsWatch:
    """Applies models and the node's limits of one settings file. A file that is broken changes nothing; `say` is told where.

    `plane`: as `up` wrote it; with other limits it is written again, for the worker that starts next.
    """

    def __init__(self, path: Path, bus: Bus, plane: Plane, say: Callable[[str], None]) -> None:
        self.path = path
        self._bus, self._plane, self._say = bus, plane, say
        self._actor = f"operator:{_user()}"
        self._running: NodeSettings | None = None
        """What the first of them said of the node: that is what runs."""
        self._said = ""
        self._told: NodeLimits | None = None
        """As the decider has them from this file; None: nothing was applied yet."""
        self._unkept = False
        self._idle: tuple[str, ...] = ()

    async def apply(self, settings: Settings) -> int:
        """Send models and limits to the decider, which applies the difference; returns the position of the last event of it
        (0: there was none). Raises Refused."""
        self._running = self._running or settings.node
        limits = _limits(settings.node, self._plane)
        command = ApplySettings(
            path=str(self.path), digest=settings.digest, models=settings.models, node=self._plane.node, limits=limits
        )
        order = Order(id=ids.new(ids.COMMAND), actor=self._actor, body=command)
        async with asyncio.timeout(APPLY_S):
            while True:
                try:
                    answer = await self._bus.command(COMMAND_OPERATOR, order)
                    break
                except Refused as refused:
                    if refused.code is not Code.UNAVAILABLE:
                        raise
                    await asyncio.sleep(0.1)  # the decider is on its way up; the same order gets one answer
        self._told = limits
        self._plane.settings_unapplied.unlink(missing_ok=True)
        await self._keep()
        self._tell_later(self._running, settings.node)
        await self._tell_idle_pins(limits.image_pins)
        return answer.position

    def unapplied(self, why: str) -> None:
        """Say that the file is not applied. Until one is, `status` and `doctor` say so, too."""
        try:
            self._plane.settings_unapplied.write_text(why)
        except OSError as error:  # a full disk
            log.error("settings_trouble_not_kept", reason=str(error))
        self._say(f"settings not applied: {why}")

    async def _keep(self) -> None:
        """Write the limits down for the worker that starts next. On a full disk they count all the same; it is tried again."""
        now = structs.replace(self._plane, **structs.asdict(self._told)) if self._told is not None else self._plane
        if now == self._plane:
            return
        try:
            await asyncio.to_thread(now.write)
        except OSError as error:
            if not self._unkept:
                log.error("limits_not_kept", data=now.data, reason=str(error))
            self._unkept = True
        else:
            self._plane, self._unkept = now, False

    def _tell_later(self, running: NodeSettings, written: NodeSettings) -> None:
        """Say which lines of the file are not what runs, once for each set of them."""
        lines = [KEYS[key] for key in KEYS if getattr(running, key) != getattr(written, key)]
        later = ", ".join(lines)
        if later and later != self._said:
            self._say(f"{self.path}: {later}: changed, but these lines count from the next start of `enginehouse up` on")
        self._said = later

    async def _tell_idle_pins(self, pins: tuple[str, ...]) -> None:
        """Say which pins pin nothing as things are, once for each set of them; what is called so later is pinned then."""
        if not pins:
            self._idle = ()
            return
        try:
            idle = idle_pins(await self._bus.state(), pins)
        except Refused as refused:  # `status` and `doctor` say it, too
            log.warning("pins_not_looked_at", code=refused.code, reason=refused.message)
            return
        if idle != self._idle:
            for note in idle:
                log.warning("pin_idle", path=str(self.path), reason=note)
                self._say(f"{self.path}: {note}")
        self._idle = idle

    async def follow(self, seen: Stamp) -> None:
        """Apply the file whenever it differs from `seen`; for ever."""
        missed = 0
        while True:
            await asyncio.sleep(POLL_S)
            await self._keep()
            now = stamp(self.path)
            if now is not None and not now[SIZE]:
                now = None  # some editors empty a file before they write it: that is no order to retire all models
            missed = missed + 1 if now is None else 0
            if missed == GONE_LOOKS:
                log.warning("settings_gone", path=str(self.path))
                self._say(f"settings file {self.path} is gone, empty, or can't be read: what was applied from it stays")
            if now == seen or now is None:  # not there: it is being replaced, or was taken away; the models stay
                continue
            if await self._changed():
                seen = now

    async def _changed(self) -> bool:
        """Whether that is settled: applied, or not to be applied as it is. Not so when nobody answered."""
        try:
            settings = await asyncio.to_thread(read, self.path)
            await self.apply(settings)
        except SettingsError as error:
            log.warning("settings_broken", path=error.path, line=error.line, key=error.key, reason=error.message)
            self.unapplied(str(error))
        except Refused as refused:
            log.warning("settings_refused", path=str(self.path), code=refused.code, reason=refused.message)
            self.unapplied(f"{self.path}: {refused.message}")
        except TimeoutError:
            log.warning("settings_unanswered", path=str(self.path), waited_s=APPLY_S)
            return False
        else:
            log.info("settings_applied", path=str(self.path), digest=settings.digest)
            self._say(f"settings applied: {self.path}")
        return True


def _limits(settings: NodeSettings, plane: Plane) -> NodeLimits:
    return NodeLimits(
        image_quota_bytes=settings.image_quota_bytes, image_pins=settings.image_pins,
        checkpoint_bytes=checkpoint_bytes(settings, plane.pool_bytes, plane.devices),
    )  # fmt: skip


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # an account without a name
        return "unknown"
