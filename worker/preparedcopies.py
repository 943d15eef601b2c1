"""Prepared copies leave the disk when no model, no instance and no image of this node needs them any more.

Copies of models that draft go at once, what was fetched, converted or made of sources after `GRACE_S`: one sweep for both.
"""

import asyncio
import contextlib
import enum
import math
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, assert_never

import structlog

from controlplane.quantities import human_bytes
from worker import instancedir, processes
from worker.desired import Desired
from worker.images.manifest import ImageBroken
from worker.images.store import Store
from worker.moves import Goal
from worker.shelf import Shelf
from worker.sources import copies, leaving

GRACE_S: Final = 600.0
"""Who takes a model out of the settings for a moment does not want 60 GB fetched again."""
PAUSE_S: Final = 60.0
"""Before each look at sources. A start first applies its settings, which may name again what nothing needed when the last plane
ended; and what switches models in milliseconds must not pay for a look each time."""
AGAIN_S: Final = 600.0
"""Before another try of a look that failed, whatever the reason."""

log = structlog.get_logger("copies")


class Kind(enum.StrEnum):
    """What is looked at apart, because it goes for reasons of its own."""

    DRAFTS = enum.auto()
    SOURCES = enum.auto()


class PreparedCopies:
    """`desired` is asked for the newest fold, `used` for the paths that processes and images have; in a thread."""

    def __init__(self, data: Path, shelf: Shelf, desired: Callable[[], Desired], used: Callable[[], list[str]]) -> None:
        self._models, self._shelf, self._desired, self._used = data / "models", shelf, desired, used
        self._looked: tuple[object, ...] | None = None
        self._read: frozenset[str] | None = None
        """Configurations in use as of the last fold."""
        self._since: dict[str, float] | None = None
        """As `leaving.note` has it, whether or not the disk had room for it; None: not looked yet."""
        self._due: dict[Kind, float] = {}
        """What waits to be looked at, and from when on (monotonic seconds)."""
        self._changed = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Look at the newest fold: whenever models, instances or images are others, see what may go."""
        desired = self._desired()
        looked = (desired.models, desired.instances, desired.images)
        if self._looked is not None and all(new is old for new, old in zip(looked, self._looked, strict=True)):
            return
        self._looked = looked
        was, self._read = self._read, read(desired)
        if was is None or not was <= self._read:
            self._look(Kind.DRAFTS, 0.0)
        self._look(Kind.SOURCES, PAUSE_S)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    def _look(self, kind: Kind, wait_s: float) -> None:
        """Before long, or sooner if that was said already."""
        self._due[kind] = min(self._due.get(kind, math.inf), time.monotonic() + wait_s)
        self._changed.set()
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep(), name="prepared copies")

    async def _sweep(self) -> None:
        """Until nothing is left that waits to be looked at or removed. Nothing that goes wrong ends it."""
        while self._due:
            self._changed.clear()
            kind = min(self._due, key=self._due.__getitem__)
            if (wait_s := self._due[kind] - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
                continue
            del self._due[kind]
            try:
                again_s = await self._swept(kind)
            except OSError as error:
                again_s = AGAIN_S
                log.warning("prepared_copies_kept", kind=kind, reason=str(error), again_s=again_s)
            except Exception:
                again_s = AGAIN_S
                log.exception("prepared_copies_kept", kind=kind, again_s=again_s)
            if again_s is not None:
                self._look(kind, again_s)

    async def _swept(self, kind: Kind) -> float | None:
        """Remove what may go. Seconds until the next may, if there is one."""
        match kind:
            case Kind.DRAFTS:
                await self._drafts_swept()
                return None
            case Kind.SOURCES:
                return await self._sources_swept()
            case _:
                assert_never(kind)

    async def _drafts_swept(self) -> None:
        async with self._shelf.still():
            desired = self._desired()
            held = {path.name for path in self._shelf.drafts(desired.models)}
            gone = await asyncio.to_thread(copies.remove, self._models, read(desired), held, drafted(desired))
        if gone:
            log.info("draft_copies_removed", copies=gone)

    async def _sources_swept(self) -> float | None:
        """What nothing has needed for long enough."""
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
            self._since = await asyncio.to_thread(leaving.unneeded_since, self._models)
        known, now = self._since, time.time()
        self._since = {name: min(known.get(name, now), now) for name in sorted(unneeded)}
        try:
            await asyncio.to_thread(leaving.note, self._models, self._since)
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


def read(desired: Desired) -> frozenset[str]:
    """Configurations of models that are not retired, and of all instances here, wherever they are: they may be told to read."""
    of_models = (model.facts.configuration for model in desired.models.values() if model.facts and not model.retired)
    return frozenset(of_models) | {wanted.configuration for wanted in desired.instances.values()}


def drafted(desired: Desired) -> frozenset[str]:
    """Of those, the configurations of models that name one which drafts for them."""
    named = (model for model in desired.models.values() if model.spec.arguments.get("draft_model"))
    return read(desired) & {model.facts.configuration for model in named if model.facts}


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
