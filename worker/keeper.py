"""One task per instance brings what is to what should be, one yield point after another.

The task alone writes its instance's state. Between two steps it looks again: a newer directive counts from there on.
A step under way is finished first, but for the long ones that may be given up (`moves.ABANDONABLE`).
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final

import structlog

from controlplane.commands import ReportFailed
from controlplane.events import Step
from controlplane.rungs import Rung
from worker import skeleton, steps
from worker.desired import Wanted
from worker.failure import StepFailed
from worker.ledge import NO_ROOM, Ledge, ledge
from worker.local import LocalInstance
from worker.loss import lost
from worker.moves import ABANDONABLE, SILENT, EngineState, Move, StepName
from worker.outcome import outcome
from worker.plan import plan
from worker.pulse import Pulse
from worker.report import Report
from worker.site import Site

UNKILLABLE_S: Final = 5.0
"""Between two tries to end a process that outlived SIGKILL (it hangs in the kernel)."""

DEATH_S: Final = 1.0
"""Between a broken connection and the news of the process's death lie milliseconds."""

log = structlog.get_logger("keeper")


class Keeper:
    """The task of one instance. `want` may be called at any time; everything else happens inside `run`."""

    def __init__(self, site: Site, instance: str, report: Callable[[Report], None]) -> None:
        self._site, self._report = site, report
        self._changed = asyncio.Event()
        self.local = LocalInstance(site, instance, self._changed.set)
        self._pulse = Pulse(self.local)
        self._wanted: Wanted | None = None
        self._began = time.monotonic()
        self._steps: list[Step] = []
        self._check = "skipped"
        self._reported: int | None = None
        """The directive that this task has answered."""
        self._running: dict[Move, asyncio.Task[steps.Done]] = {}
        self._ledge: Ledge | None = None
        """Where it stays instead of where it could not get to."""
        self._begun_for: dict[Move, int | None] = {}
        """The directive under which a running move was begun."""

    def want(self, wanted: Wanted | None) -> None:
        """Where the instance should be from now on; None: the plane does not know it, so it must go."""
        if wanted == self._wanted:
            return
        if _number(wanted) != _number(self._wanted):
            self._began, self._steps, self._check = time.monotonic(), [], "skipped"
            self.local.restored_from = None
            self.local.note(sought=False)  # an image that was there may have been removed since
        self._wanted = wanted
        self._changed.set()

    async def run(self) -> None:
        """Work until the instance has ended. Cancelled, it leaves its processes as they are, for the next worker."""
        try:
            while not await self._turn():
                pass
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), self._pulse.stop(), return_exceptions=True)
            self.local.forget()

    async def _turn(self) -> bool:
        """One look, and what follows from it; True: the instance has ended."""
        self._changed.clear()
        wanted = self._aim()
        rung = wanted.directive.rung if wanted and wanted.directive else Rung.COLD
        gone = lost(self.local, self._wanted, rung, working=bool(self._running))
        if wanted is not None and rung is not Rung.COLD and gone is not None:
            busy = next((move.step.value for move in self._running), "serve" if wanted.reached is Rung.UP else "rest")
            await self._fail(wanted, busy, *gone)
            return True
        moves = plan(wanted, self.local.seen)
        await self._give_up({move for move in self._running if move not in moves and move.step in ABANDONABLE})
        if all(move in moves for move in self._running):
            for move in moves:
                if move not in self._running:
                    self._running[move] = asyncio.create_task(steps.run(self.local, wanted, move))
                    self._begun_for[move] = _number(wanted)
        if not self._running and not moves and self._settle(wanted, rung):
            return True
        return await self._await_steps()

    async def _await_steps(self) -> bool:
        """Wait for a step's end, for news, or for a process that has stopped answering."""
        if all(move.step in SILENT for move in self._running):
            self._pulse.feel()
        else:
            await self._pulse.stop()  # a step has its own deadline, and may keep the engine from answering anybody else
        poked = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({*self._running.values(), *self._pulse.felt, poked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            poked.cancel()
        if (hung := self._pulse.hung()) is not None:
            self.local.lost = self.local.lost or (hung.code, hung.message)
            self.local.note(engine=EngineState.DEAD)  # as good as: it is killed before anything is said of it
        for move in [move for move, task in self._running.items() if task.done()]:
            task, begun_for = self._running.pop(move), self._begun_for.pop(move)
            failure = _failure(move, task)
            if failure is None:
                done = task.result()
                self._steps += (Step(done.name, done.took_ms, done.moved_bytes), *done.parts)
                self._check = done.note or self._check
            elif await self._failed(move, failure, begun_for):
                return True
        return False

    def _aim(self) -> Wanted | None:
        """What is wanted, or where it stays instead."""
        wanted = self._wanted
        if wanted is None or wanted.directive is None or self._ledge is None or self._ledge.directive != _number(wanted):
            return wanted
        return self._ledge.aim(wanted)

    async def _failed(self, move: Move, failure: StepFailed, begun_for: int | None) -> bool:
        """A step has failed, begun under directive `begun_for`; True: the instance has ended with it."""
        wanted = self._aim()
        log.warning("step_failed", instance=self.local.instance, step=move.step, code=failure.code, message=failure.message)
        if move.step is StepName.CLEAR:
            await asyncio.sleep(UNKILLABLE_S)  # and the plan names it again
            return False
        if wanted is None or wanted.directive is None or wanted.directive.rung is Rung.COLD:
            await self._give_up(set(self._running))
            await self._clear()  # it should go anyway: by force, then
            return self._settle(wanted, Rung.COLD)
        if begun_for != _number(wanted) and move not in plan(wanted, self.local.seen):
            return False  # it was for an earlier directive
        if failure.code in ("engine_died", "holder_died") and self.local.lost is None:
            with contextlib.suppress(TimeoutError):  # the death itself says more than that nobody answered
                async with asyncio.timeout(DEATH_S):
                    await self._changed.wait()
        if failure.code in (*NO_ROOM, "no_device_memory"):
            await self._site.books.doubt()  # before the failure itself is told, so that the next try knows of it
        if (found := await ledge(self.local, wanted, move.step, failure)) is not None:
            self._ledge = found
            return False
        code, message = self.local.lost or (failure.code, failure.message)
        await self._fail(wanted, move.step.value, code, message)
        return True

    def _settle(self, wanted: Wanted | None, rung: Rung) -> bool:
        """The directive is reached: report it once. True: nothing is left."""
        if wanted is None:
            return not self.local.seen.present
        told = wanted.answered or (wanted.directive is not None and self._reported == wanted.directive.number)
        if wanted.directive is None or (told and not (rung is Rung.UP and self.local.moved)):
            return rung is Rung.COLD and wanted.directive is not None
        self.local.moved = False
        took_ms, stays = round((time.monotonic() - self._began) * 1000), self._ledge
        self._report(
            outcome(
                self.local, wanted, rung, took_ms=took_ms, steps=tuple(self._steps), check=self._check,
                failure=stays.failure if stays is not None and stays.directive == wanted.directive.number else None,
            )
        )  # fmt: skip
        self._reported = wanted.directive.number
        return rung is Rung.COLD

    async def _fail(self, wanted: Wanted, step: str, code: str, message: str) -> None:
        """Clean up, see that nothing is left, and only then say so: whoever gets the cells next finds them free."""
        assert wanted.directive is not None
        log.warning("instance_failed", instance=wanted.instance, step=step, code=code, message=message)
        await self._give_up(set(self._running))
        await self._clear()
        self._report(
            ReportFailed(
                node=self._site.plane.node, instance=wanted.instance, directive=wanted.directive.number, rung=wanted.reached,
                step=step, code=code, message=message,
            )
        )  # fmt: skip

    async def _clear(self) -> None:
        while True:
            try:
                await skeleton.clear(self.local)
            except StepFailed as failure:
                log.error("not_cleared", instance=self.local.instance, code=failure.code, message=failure.message)
                await asyncio.sleep(UNKILLABLE_S)
            else:
                return

    async def _give_up(self, moves: Iterable[Move]) -> None:
        for move in moves:
            log.info("step_given_up", instance=self.local.instance, step=move.step, directive=_number(self._wanted))
            task = self._running.pop(move)
            self._begun_for.pop(move, None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _number(wanted: Wanted | None) -> int | None:
    return wanted.directive.number if wanted is not None and wanted.directive is not None else None


def _failure(move: Move, task: "asyncio.Task[steps.Done]") -> StepFailed | None:
    error = task.exception()
    if error is None or isinstance(error, StepFailed):
        return error
    log.error("step_broke", step=move.step, exc_info=error)
    return StepFailed("failed", f"{move.step}: {error!r}")


def left_over(local: LocalInstance) -> bool:
    """Whether an adopted directory holds nothing that can be kept: no holder, or an engine that is dead."""
    return not local.seen.holder or local.seen.engine is EngineState.DEAD
