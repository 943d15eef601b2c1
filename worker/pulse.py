"""Whether an instance's processes still answer: one that hangs is as dead as one that has ended, but no pidfd says so.

An engine is asked through its holder, so that one question is about both. Off its GPU an engine can't answer: its holder is
asked by itself. So is one that has no engine yet, which leaves when nobody asks it any more: a source may take hours to come. A
frontend is asked, too: it is replaced, and its callers go on where they were.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import structlog

from worker import processes
from worker.engines.messages import Health
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderGone
from worker.local import LocalInstance
from worker.moves import EngineState
from worker.service import FrontendGone

RETRY_S: Final = 0.1
"""After a question that failed at once: somebody is about to connect again, or has just died."""
AGAIN_S: Final = 2.0
"""For the last question, after the deadline. Whoever stood still itself (the machine, this process) hears its answer now."""

log = structlog.get_logger("pulse")


class Pulse:
    """Asks while it is felt for: every few seconds, one question at a time."""

    def __init__(self, local: LocalInstance) -> None:
        self._local = local
        self._engine: asyncio.Task[StepFailed] | None = None
        self._frontend: asyncio.Task[None] | None = None

    @property
    def felt(self) -> tuple[asyncio.Task[StepFailed], ...]:
        """What ends when the engine or its holder is found to hang."""
        return (self._engine,) if self._engine is not None else ()

    def feel(self) -> None:
        """Go on asking those that are there."""
        seen, name = self._local.seen, self._local.instance
        if self._engine is None and seen.holder and (ask := ASKED.get(seen.engine)) is not None:
            self._engine = asyncio.create_task(_engine(self._local, partial(ask, self._local)), name=f"{name}:pulse")
        if seen.frontend and (self._frontend is None or self._frontend.done()):
            self._frontend = asyncio.create_task(_frontend(self._local), name=f"{name}:frontend pulse")

    def hung(self) -> StepFailed | None:
        """Why the instance can't go on, once that has been found."""
        if self._engine is None or not self._engine.done():
            return None
        task, self._engine = self._engine, None
        return task.result()

    async def stop(self) -> None:
        """Ask nothing more. A question on its way is answered to nobody."""
        tasks = [task for task in (self._engine, self._frontend) if task is not None]
        self._engine = self._frontend = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _engine(local: LocalInstance, ask: Callable[[float], Awaitable[StepFailed | None]]) -> StepFailed:
    """Ask until nobody answers; return which of the two that is. A holder that hangs is dead by then, and its engine, too."""
    while True:
        await asyncio.sleep(local.site.deadlines.pulse)
        failure = await _insist(ask, local.site.deadlines.hung)
        if failure is not None:
            if failure.code == "holder_died":
                _kill_both(local)
            return failure


async def _frontend(local: LocalInstance) -> None:
    """Ask until it does not answer, and kill it then: its end is news, and another is started on its port."""
    while True:
        await asyncio.sleep(local.site.deadlines.pulse)
        record = local.directory.read()
        if record is None or record.frontend is None or not local.seen.frontend:
            return
        failure = await _insist(partial(_asked_frontend, local, record.port), local.site.deadlines.hung)
        if failure is not None:
            log.warning("frontend_hung", instance=local.instance, pid=record.frontend.pid, message=failure.message)
            processes.send(record.frontend, signal.SIGKILL)
            return


async def _insist(ask: Callable[[float], Awaitable[StepFailed | None]], hung_s: float) -> StepFailed | None:
    """Ask until there is an answer, or until `hung_s` have passed and one more question has had none; return its failure."""
    ends, wait_s, last = time.monotonic() + hung_s, hung_s, False
    while (failure := await ask(wait_s)) is not None and not last:
        left_s = ends - time.monotonic()
        wait_s, last = (AGAIN_S, True) if left_s <= 0 else (left_s, False)
        await asyncio.sleep(RETRY_S)
    return failure


async def _asked_engine(local: LocalInstance, deadline_s: float) -> StepFailed | None:
    try:
        await local.holder.tell(Health(), deadline_s)
    except HolderGone as error:
        return StepFailed("holder_died", f"the holder hangs and was killed, and the engine with it: {error}")
    except HolderDenied as error:
        return StepFailed("engine_hung", f"the engine hangs and was killed: {error.message}")
    return None  # whatever it says, it has read the question


async def _asked_holder(local: LocalInstance, deadline_s: float) -> StepFailed | None:
    try:
        await local.holder.ask(deadline_s=deadline_s)
    except HolderGone as error:
        return StepFailed("holder_died", f"the holder hangs and was killed, and its engine, if it had one, with it: {error}")
    except HolderDenied:
        pass  # it has read the question
    return None


ASKED: Final = {
    EngineState.CONNECTED: _asked_engine, EngineState.CHECKPOINTED: _asked_holder, EngineState.ABSENT: _asked_holder,
}  # fmt: skip
"""Who is asked; in other states a step with a deadline is under way, or nobody is there."""


async def _asked_frontend(local: LocalInstance, port: int, deadline_s: float) -> StepFailed | None:
    try:
        await local.frontend.status(port, deadline_s=deadline_s)
    except FrontendGone as error:
        return StepFailed("frontend_failed", str(error))
    return None


def _kill_both(local: LocalInstance) -> None:
    """What is asked of a holder that hangs is lost, so both are ended from here, the engine first: it uses the cells."""
    if (record := local.directory.read()) is None:
        return
    local.ending = True
    for process in (record.engine, record.holder):
        if process is not None:
            processes.send(process, signal.SIGKILL)
