"""Whether the disk has room by now for those that stayed off it for want of that. What it finds is told once.

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
        for wanted in self._desired().instances.values():
            if wanted.unsaved and wanted.answered and await asyncio.to_thread(self._has_room, wanted):
                assert wanted.directive is not None
                log.info("room_for_image", instance=wanted.instance)
                self._report(ReportImageRoom(node=self._node, instance=wanted.instance, directive=wanted.directive.number))

    def _has_room(self, wanted: Wanted) -> bool:
        """Nothing is removed for it yet."""
        if (record := InstanceDir(self._instances, wanted.instance).read()) is None:
            return False
        try:
            self._cabinet.budget.room_for(room_bytes(record))
        except NoRoom:
            return False
        return True
