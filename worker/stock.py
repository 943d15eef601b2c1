"""The node's models and weight sets, kept as the plane wants them: inspected, staged when asked for, dropped when dismissed."""

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Final

import structlog

from controlplane.arguments import shaping
from controlplane.commands import ReportDropped, ReportModel, ReportStaged, ReportUnusable
from controlplane.fleet import Model
from controlplane.spec import ModelFacts
from pool.described import Described
from pool.messages import Staged
from pool.ranks import form_of, joined, split
from worker.board import Board
from worker.desired import Desired
from worker.failure import StepFailed
from worker.moves import Goal
from worker.report import Report
from worker.shelf import ProgressCall, Shelf, Shelved

RETRY_S: Final = 0.5
"""A dismissed set leaves as soon as the last engine that maps it has unmapped it."""
STRAY_S: Final = 30.0
"""How long plane and pool may differ over a set before that is mended: a report may be on its way."""
AGAIN_S: Final = (10.0, 60.0)
"""A source that could not be opened is tried again after this long, doubled each time up to the second figure: opening takes a
processor for seconds. An operator's `retry` does not wait."""

log = structlog.get_logger("stock")


class Stock:
    """`desired` is asked for the newest fold."""

    def __init__(self, shelf: Shelf, desired: Callable[[], Desired], report: Callable[[Report], None], board: Board) -> None:
        self._shelf, self._desired, self._report, self._board = shelf, desired, report, board
        self._inspections: dict[tuple[Goal, int], asyncio.Task[None]] = {}
        """By what is to be opened, and when it was last asked for."""
        self._drops: dict[str, asyncio.Task[None]] = {}
        self._strays: dict[str, float] = {}
        """Sets that only the plane or only the pool knows, and since when (monotonic seconds)."""
        shelf.room_coming = lambda: bool(desired().dismissed)

    def follow(self) -> None:
        """Look at the newest fold: begin what is missing, give up what nobody wants any more."""
        desired = self._desired()
        models = [model for model in desired.models.values() if _uninspected(model)]
        due = {(Goal(model.model, model.revision), model.fresh_ms): model for model in models}
        for asked in self._inspections.keys() - due.keys():
            self._inspections.pop(asked).cancel()
        for asked, model in due.items():
            if asked not in self._inspections:
                goal, _ = asked
                self._shelf.forget(goal)
                self._inspections[asked] = asyncio.create_task(self._inspect(goal, model), name=f"inspect:{goal.model}")
        for weight_set in self._drops.keys() - desired.dismissed:
            self._drops.pop(weight_set).cancel()
        for weight_set in desired.dismissed - self._drops.keys():
            self._drops[weight_set] = asyncio.create_task(self._drop(weight_set), name=f"drop:{weight_set}")

    async def compare(self, present: Collection[str], now_s: float) -> None:
        """Bring plane and pool together over what is in the pool (`present`) at `now_s` (monotonic); called every second or so.

        What the plane counts and the pool has lost (it was corrupt) is reported. What nobody counts (staged by a worker that
        died before it said so, or there when a worker began without its pool) is dropped: it takes room that is given away.
        """
        staged = self._desired().staged
        odd = set(staged.keys()) ^ set(present)
        self._strays = {name: self._strays.get(name, now_s) for name in odd if name not in self._drops}
        for name in [name for name, since in self._strays.items() if now_s - since >= STRAY_S]:
            del self._strays[name]
            if name in staged:
                log.warning("weights_lost", weight_set=name)
                self._report(ReportDropped(node=self._desired().node, weight_set=name, code="lost"))
            elif await self._shelf.dropped(name):
                log.warning("stray_weights_dropped", weight_set=name)

    async def close(self) -> None:
        tasks = [*self._inspections.values(), *self._drops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def prepared(self, goal: Goal, progress: ProgressCall) -> Shelved:
        """The source of a directive's model. Raises StepFailed; `superseded` when that revision is gone."""
        model = self._desired().models.get(goal.model)
        if model is None or (model.revision != goal.revision and model.facts is None):
            raise StepFailed("superseded", f"{goal.model} revision {goal.revision} has been replaced by another one")
        shelved = await self._shelf.prepared(model, progress)  # a newer revision with facts differs in soft fields only
        if shelved.draft is not None and model.facts is not None:
            _same_draft(shelved, model.facts)
        return shelved

    async def staged(self, shelved: Shelved, progress: ProgressCall, *, patience_s: float) -> Staged:
        """Its weights in the pool, told to the plane the first time. Raises StepFailed."""
        staged = await self._shelf.staged(shelved, progress, patience_s=patience_s)
        self.tell(shelved, staged)
        return staged

    async def found(self, shelved: Shelved, form: str, *, patience_s: float) -> Staged | None:
        """Its weights in the pool in an engine's own form, told to the plane the first time; None: a skeleton must bring them.

        Raises StepFailed.
        """
        ranks = shelved.model.spec.gpus
        forms = [form_of(form, rank, ranks) for rank in range(ranks)] if ranks > 1 else [form]
        parts = [await self._shelf.found(shelved, one, patience_s=patience_s) for one in forms]
        if not all(parts):
            return None
        staged = joined([part for part in parts if part is not None])
        self.tell(shelved, staged)
        return staged

    def tell(self, shelved: Shelved, staged: Staged) -> None:
        """Report a model's weights in the pool, unless the plane knows of them; of a gang those of each rank."""
        for part in split(staged):
            self._tell(shelved, part)

    def _tell(self, shelved: Shelved, staged: Staged) -> None:
        desired, goal = self._desired(), shelved.goal
        known = desired.staged.get(staged.weight_set, ())
        if (goal.model, goal.revision) not in known or staged.weight_set in desired.dismissed:
            self._report(
                ReportStaged(
                    node=desired.node, model=goal.model, revision=goal.revision, weight_set=staged.weight_set,
                    size_bytes=staged.size_bytes, took_ms=staged.took_ms, read_bytes=staged.read_bytes,
                )
            )  # fmt: skip

    async def described(self) -> Described | None:
        """What the pool holds, on devices as well; None while no daemon answers."""
        return await self._shelf.described()

    async def find(self, name: str) -> Shelved:
        """The source of a model by name, for measuring a prompt. Raises StepFailed."""
        model = self._desired().models.get(name)
        if model is None:
            raise StepFailed("model_unknown", f"this node knows no model {name!r}")
        return await self._shelf.prepared(model, lambda done, total: None)

    async def _inspect(self, goal: Goal, model: Model) -> None:
        """Open a model's source until it is known what it needs, or that it can't be used."""
        subject, wait_s = f"model:{goal.model}", AGAIN_S[0]
        while True:
            self._board.show(subject, "inspecting")
            try:
                shelved = await self._shelf.prepared(
                    model, lambda done, total: self._board.show(subject, "prepare", done, total)
                )
            except StepFailed as failure:
                self._unusable(goal, failure.code, failure.message, final=failure.final)
                if failure.final:
                    return
            except Exception as error:
                log.exception("inspection_failed", model=goal.model)
                self._unusable(goal, "weights_unusable", f"its source could not be opened: {error!r}", final=True)
                return
            else:
                spec = model.spec
                self._report(
                    ReportModel(
                        node=self._desired().node, model=goal.model, revision=goal.revision, facts=shelved.facts,
                        engine=spec.engine, arguments=shaping(spec.engine, spec.arguments),
                    )
                )  # fmt: skip
                return
            finally:
                self._board.clear(subject)
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, AGAIN_S[1])

    def _unusable(self, goal: Goal, code: str, message: str, *, final: bool) -> None:
        node = self._desired().node
        self._report(
            ReportUnusable(node=node, model=goal.model, revision=goal.revision, code=code, message=message, final=final)
        )

    async def _drop(self, weight_set: str) -> None:
        began = time.monotonic()
        while not await self._left(weight_set):  # noqa: ASYNC110 (another process's state)
            await asyncio.sleep(RETRY_S)
        log.info("weights_dropped", weight_set=weight_set, waited_s=round(time.monotonic() - began, 3))
        self._report(ReportDropped(node=self._desired().node, weight_set=weight_set, code="dismissed"))

    async def _left(self, weight_set: str) -> bool:
        """Take it out of the pool. A fault of ours must not leave it there for ever: the room it takes is given away."""
        try:
            return await self._shelf.dropped(weight_set)
        except Exception:
            log.exception("drop_failed", weight_set=weight_set, again_s=AGAIN_S[0])
            await asyncio.sleep(AGAIN_S[0])
            return False


def _same_draft(shelved: Shelved, known: ModelFacts) -> None:
    """Weights are kept by the configuration that the plane knows, which the draft's content is part of. Raises StepFailed."""
    name, was, now = shelved.model.model, known.configuration, shelved.facts.configuration
    if was != now:
        raise StepFailed(
            "draft_changed",
            f"{name} was inspected as {was} and would be {now} now: its draft_model, or the engine's version, is another one "
            "since; put that back, or retire the model and add it again",
        )


def _uninspected(model: Model) -> bool:
    return model.facts is None and model.rejection is None and not model.retired
