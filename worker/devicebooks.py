"""What is in use of each GPU of the node and whose it is, as measured; what others have there is told to the plane."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Final

import structlog

from controlplane.commands import ReportForeign
from controlplane.events.node import Outsider
from controlplane.plane import Plane
from controlplane.subjects import DeviceBytes
from pool.described import Described
from worker import gpus, ranks
from worker.engines.messages import State
from worker.instancedir import Record
from worker.ledger import Resident, ledger
from worker.report import Report
from worker.strangers import Strangers

DOUBT_S: Final = 5.0
"""A driver that hangs must not keep an instance from its end."""

log = structlog.get_logger("devices")

Engines = Callable[[], Iterable[tuple[Record, State | None]]]
"""Those that the worker keeps, with their last words of themselves."""


class DeviceBooks:
    """Nothing is known before the pool has said which process it is: its memory would be taken for somebody else's."""

    def __init__(self, plane: Plane, engines: Engines, report: Callable[[Report], None]) -> None:
        self._node, self._engines, self._report = plane.node, engines, report
        self._sizes = {known.device: known.size_bytes for known in plane.devices if known.kind == "gpu"}
        self._strangers = {device: Strangers(size) for device, size in self._sizes.items()}
        self._pool: Described | None = None
        self._ours: set[int] = set()
        """Those that the driver lists or may list; one of them that has ended may be listed for a moment more. Looked at and
        changed by the event loop's thread alone."""

    async def measure(self, pool: Described | None, *, certain: bool = False) -> dict[str, DeviceBytes]:
        """Of each GPU whose driver answers. `pool`: its word of now; None: it is away. `certain`: as in `Strangers.look`."""
        self._pool = pool or self._pool
        if not self._sizes or self._pool is None:
            return {}
        residents: dict[str, list[Resident]] = {}
        self._ours.add(self._pool.pid)
        for record, state in self._engines():
            if record.engine is not None:
                self._ours.add(record.engine.pid)
            for device, resident in ranks.residents(record, state).items():
                residents.setdefault(device, []).append(resident)
                self._ours.add(resident.pid)
        known = frozenset(self._ours)
        found, listed = await asyncio.to_thread(self._measured, self._pool, residents, known)
        # The number of one that is gone may be given to a stranger. Who came during this look is for another one to judge.
        self._ours -= known - listed
        for device, owners in found.items():
            told = (pool is not None or certain) and self._strangers[device].look(owners.foreign, certain=certain)
            if told:  # not while the pool is away: the next daemon's memory is not known for its own yet
                processes = tuple(Outsider(pid=pid, size_bytes=size, name=program(pid)) for pid, size in owners.foreign.items())
                self._report(ReportForeign(node=self._node, device=device, processes=processes))
        return found

    async def doubt(self) -> None:
        """Somebody has found no room on a device: look at once, and say at once who has it."""
        try:
            async with asyncio.timeout(DOUBT_S):
                await self.measure(None, certain=True)
        except Exception:  # who asks has a failure of his own to tell
            log.exception("not_measured")

    def _measured(
        self, pool: Described, residents: Mapping[str, list[Resident]], ours: Set[int]
    ) -> tuple[dict[str, DeviceBytes], set[int]]:
        """With all pids that the driver lists. In a thread of its own: two looks may be taken at once, and share nothing."""
        sets = {one.device: one.resident_bytes for one in pool.devices}
        found, listed = {}, set[int]()
        for device in self._sizes:
            if (used := gpus.used_bytes(device)) is not None:
                processes = gpus.processes(device)
                listed |= processes.keys()
                found[device] = ledger(
                    processes, used_bytes=used, pool_pid=pool.pid, pool_set_bytes=sets.get(device, 0),
                    engines=residents.get(device, []), former=ours,
                )  # fmt: skip
        return found, listed


def program(pid: int) -> str:
    """Its name, as the kernel has it; empty where that can't be seen."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
