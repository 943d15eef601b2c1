"""Prepared sources leave the disk when no model, no instance and no image of this node needs them any more."""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec
import structlog

from controlplane.quantities import human_bytes
from worker import instancedir, processes
from worker.desired import Desired
from worker.images.manifest import ImageBroken
from worker.images.store import Store
from worker.moves import Goal
from worker.shelf import Shelf
from worker.sources import leaving

GRACE_S: Final = 600.0
"""Who takes a model out of the settings for a moment does not want 60 GB fetched again."""
PAUSE_S: Final = 60.0
"""Before each look. A start first applies its settings, which may name again what nothing needed when the last plane ended; and
what switches models in milliseconds must not pay for a look each time."""
UNNEEDED: Final = "unneeded.json"
"""In `DIR/models`: name -> Unix seconds since when nothing needs it, so that planes that live shorter than that sweep, too."""

log = structlog.get_logger("sources")


class PreparedCopies:
    """`desired` is asked for the newest fold, `used` for the paths that processes and images have; in a thread."""

    def __init__(self, data: Path, shelf: Shelf, desired: Callable[[], Desired], used: Callable[[], list[str]]) -> None:
        self._models, self._shelf, self._desired, self._used = data / "models", shelf, desired, used
        self._looked: tuple[object, ...] | None = None
        self._since: dict[str, float] | None = None
        """As `note` has it, whether or not the disk had room for it; None: not looked yet."""
        self._changed = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Look at the newest fold: whenever models, instances or images are others, see what may go."""
        desired = self._desired()
        looked = (desired.models, desired.instances, desired.images)
        if self._looked is not None and all(new is old for new, old in zip(looked, self._looked, strict=True)):
            return
        self._looked = looked
        self._changed.set()
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep(), name="prepared copies")

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    async def _sweep(self) -> None:
        """Until nothing is left that waits to be removed."""
        while True:
            await self._pause()
            self._changed.clear()
            wait_s: float | None = None
            try:
                wait_s = await self._swept()
            except OSError as error:
                log.warning("prepared_sources_kept", reason=str(error), again_s=GRACE_S)
                wait_s = GRACE_S
            if wait_s is None and not self._changed.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    async def _pause(self) -> None:
        await asyncio.sleep(PAUSE_S)

    async def _swept(self) -> float | None:
        """Remove what nothing has needed for long enough. Seconds until the next is due, if there is one. Raises OSError."""
        unneeded = await self._unneeded()
        since = await self._noted(unneeded)
        due = [name for name in unneeded if time.time() - since[name] >= GRACE_S]
        if due:
            async with self._shelf.still():
                due = sorted(set(due) & await self._unneeded())  # what was prepared meanwhile is needed
                aside = await asyncio.to_thread(leaving.put_aside, self._models, due)
            for name, path in aside.items():
                size = await asyncio.to_thread(leaving.size_bytes, path)
                await asyncio.to_thread(shutil.rmtree, path)
                log.info("prepared_source_removed", source=name, freed=human_bytes(size), freed_bytes=size)
            since = await self._noted(unneeded - set(due))
        return max(0.0, min(since.values()) + GRACE_S - time.time()) if since else None

    async def _noted(self, unneeded: set[str]) -> dict[str, float]:
        """Since when nothing needs them. A disk too full to keep that is the last reason to remove nothing."""
        if self._since is None:
            self._since = await asyncio.to_thread(unneeded_since, self._models)
        known, now = self._since, time.time()
        self._since = {name: min(known.get(name, now), now) for name in sorted(unneeded)}
        try:
            await asyncio.to_thread(note, self._models, self._since)
        except OSError as error:
            log.warning("unneeded_not_noted", reason=str(error))
        return self._since

    async def _unneeded(self) -> set[str]:
        there = await asyncio.to_thread(leaving.prepared, self._models)
        if not there:
            return set()
        desired = self._desired()
        goals = at_work(desired)
        models = [m for m in desired.models.values() if not m.retired or any(goal.model == m.model for goal in goals)]
        goals |= {Goal(model.model, model.revision) for model in models}
        held = leaving.within(self._models, map(str, self._shelf.sources(goals)))
        used = leaving.within(self._models, await asyncio.to_thread(self._used))
        specs = [model.spec for model in models]
        return there - held - used - await asyncio.to_thread(leaving.needed, specs, self._models, there)


def at_work(desired: Desired) -> set[Goal]:
    """What instances here are told to serve, or were last, retired models included."""
    directives = (wanted.directive for wanted in desired.instances.values())
    return {Goal(d.model, d.revision or 0) for d in directives if d is not None and d.model is not None}


def used(store: Store, data: Path) -> list[str]:
    """Paths that live engines were started with or have mapped, frontends', and those that images would map again."""
    found: list[str] = []
    for directory in instancedir.listing(data / "run" / "inst"):
        record = directory.read()
        for process in instancedir.living(record).values() if record is not None else ():
            found += _paths(process.pid)
            for other in processes.in_session(process.pid):
                found += _paths(other.pid)
    for image in store.images():
        with contextlib.suppress(ImageBroken):
            found += [file.path for file in store.read(image).mapped]
    return found


def _paths(pid: int) -> Iterable[str]:
    with contextlib.suppress(OSError):  # it has ended
        proc = Path("/proc") / str(pid)
        told = (proc / "cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
        maps = (proc / "maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        return [*told, *(line[line.index("/") :] for line in maps if "/" in line)]
    return ()


def note(models: Path, since: dict[str, float]) -> None:
    """Write down for the next worker since when nothing needs them, by Unix seconds. Raises OSError."""
    if since != unneeded_since(models):
        file = models / UNNEEDED
        draft = file.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(since))
        draft.replace(file)


def unneeded_since(models: Path) -> dict[str, float]:
    """As written down last."""
    try:
        return msgspec.json.decode((models / UNNEEDED).read_bytes(), type=dict[str, float])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
