"""Whether the disk has room by now for those that stayed off it for want of that. What it finds is told once, of one a look:
room for one is no room for all.

A try costs weights that are staged and a place that is given, and each is told in events; a look costs a few files that are
read. So nothing is tried again before a look has found room.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from controlplane.commands import ReportImageRoom
from worker.desired import Desired, Wanted
from worker.images.budget import NoRoom
from worker.images.building import room_bytes
from worker.images.cabinet import Cabinet
from worker.instancedir import InstanceDir
from worker.report import Report

LOOK_S: Final = 10.0
"""Between two looks. Nobody waits for an image; a disk that is filled and emptied in less time has no room to rely on."""

log = structlog.get_logger("images")


class RoomWatch:
    """`desired` is asked for the newest fold. `instances`: `DIR/run/inst`."""

    def __init__(
        self, cabinet: Cabinet, node: str, instances: Path, desired: Callable[[], Desired], report: Callable[[Report], None]
    ) -> None:
        self._cabinet, self._node, self._instances = cabinet, node, instances
        self._desired, self._report = desired, report

    async def run(self) -> None:
        """Look until cancelled. A look that fails is skipped: the next one comes in seconds."""
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("room_not_looked_for")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        unsaved = [wanted for wanted in self._desired().instances.values() if wanted.unsaved and wanted.answered]
        if not unsaved or (wanted := await asyncio.to_thread(self._with_room, unsaved)) is None:
            return
        assert wanted.directive is not None
        log.info("room_for_image", instance=wanted.instance)
        self._report(ReportImageRoom(node=self._node, instance=wanted.instance, directive=wanted.directive.number))

    def _with_room(self, unsaved: list[Wanted]) -> Wanted | None:
        """That which needs the least, if there is room for it: else there is for none. Nothing is removed for it yet."""
        read = [(InstanceDir(self._instances, wanted.instance).read(), wanted) for wanted in unsaved]
        needs = [(room_bytes(record), wanted) for record, wanted in read if record is not None]
        if not needs:
            return None
        need_bytes, least = min(needs, key=lambda one: (one[0], one[1].instance))
        try:
            self._cabinet.budget.room_for(need_bytes)
        except NoRoom:
            return None
        return least
