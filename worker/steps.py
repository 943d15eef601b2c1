"""The steps of the ladder: each with a deadline, its time measured, its result checked; a failed one ends the instance."""

import asyncio
import time
from collections.abc import Callable
from typing import assert_never

from controlplane.events import Step
from worker import cells, checkpoint, filling, occupancy, processes, skeleton
from worker.countdown import within
from worker.desired import Wanted
from worker.engines.interface import OWN_LAYOUT
from worker.failure import StepFailed
from worker.images import building
from worker.images import steps as images
from worker.images.reading import Reading
from worker.local import LocalInstance
from worker.moves import EngineState, Goal, Move, Served, StepName
from worker.parts import Parts
from worker.service import FrontendGone


class Done(Step, frozen=True):
    """A step that went well. `note` is what a check found out."""

    note: str = ""
    parts: tuple[Step, ...] = ()
    """What it was made of, where it says."""


async def run(local: LocalInstance, wanted: Wanted | None, move: Move) -> Done:
    """Carry out one move. Raises StepFailed, `step_deadline` when it outlasts its time."""
    began, parts = time.monotonic(), Parts()
    deadline_s = local.site.deadlines.of(move.step)
    local.site.board.show(local.instance, move.step.value)
    try:
        async with within(deadline_s):
            moved, note = await _carry_out(local, wanted, move, parts)
    except TimeoutError:
        raise StepFailed("step_deadline", f"{move.step} did not end within {deadline_s:g} s") from None
    except FrontendGone as error:
        raise StepFailed("frontend_failed", str(error)) from error
    except FileNotFoundError as error:
        raise StepFailed("lost", f"{error.filename} is gone") from error
    finally:
        local.site.board.clear(local.instance, move.step.value)
    return Done(move.step.value, round((time.monotonic() - began) * 1000, 3), moved, note, parts.named(move.step.value))


async def _carry_out(local: LocalInstance, wanted: Wanted | None, move: Move, parts: Parts) -> tuple[int, str]:
    match move.step:
        case StepName.CLEAR:
            kept = local.seen.kept
            await skeleton.clear(local)
            local.note(kept=kept, sought=kept is not None)
        case StepName.SEEK:
            assert wanted is not None
            await images.seek(local, wanted)
        case StepName.END_ENGINE:
            await skeleton.end_engine(local)
        case StepName.STOP_SERVING:
            await local.frontend.stop_serving(local.record.port, deadline_s=local.site.deadlines.stop_serving)
            local.note(serving=None)
        case StepName.DRAIN:
            await occupancy.drain(local)
        case StepName.SLEEP:
            await occupancy.sleep(local)
        case StepName.DETACH:
            await occupancy.detach(local)
        case StepName.VERIFY:
            await occupancy.verify(local)
        case StepName.DROP_CELLS:
            await cells.drop_cells(local)
        case StepName.CONNECT:
            await skeleton.connect(local)
        case StepName.CHECKPOINT:
            await checkpoint.down(local, parts)
        case _:
            assert wanted is not None, "only a directive makes an instance climb"
            return await _climb(local, wanted, move, parts)
    return 0, ""


async def _climb(local: LocalInstance, wanted: Wanted, move: Move, parts: Parts) -> tuple[int, str]:
    if not local.seen.present:
        local.directory.create(wanted.configuration)
        local.note(present=True, kept=None, sought=False)
        local.ending, local.lost = False, None  # it may have been here before, and saved
    match move.step:
        case StepName.PREPARE:
            assert move.goal is not None
            await _prepare(local, wanted, move.goal)
        case StepName.STAGE:
            assert move.goal is not None
            return await _stage(local, move.goal), ""
        case StepName.DEPOSIT:
            assert move.goal is not None
            return await _deposit(local, wanted, move.goal), ""
        case StepName.START_HOLDER:
            await skeleton.start_holder(local)
        case StepName.START_ENGINE:
            await skeleton.start_engine(local)
        case StepName.RESTORE:
            return await images.restore(local, wanted), ""
        case StepName.CUDA_RESTORE:
            await checkpoint.up(local)
        case StepName.FILL:
            return await filling.fill(local), ""
        case StepName.BUILD:
            assert move.goal is not None
            return await building.build(local, move.goal, wanted, parts)
        case StepName.START_FRONTEND:
            await _start_frontend(local)
        case StepName.TAKE_CELLS:
            await cells.take_cells(local, wanted)
        case StepName.ATTACH:
            return await occupancy.attach(local), ""
        case StepName.WAKE:
            assert move.goal is not None
            await occupancy.wake(local, move.goal, wanted)
        case StepName.CHECK:
            return 0, await images.check(local, wanted)
        case StepName.SERVE:
            assert move.goal is not None
            assert move.grant is not None
            await _serve(local, move.goal, move.grant)
        case (
            StepName.CLEAR | StepName.END_ENGINE | StepName.STOP_SERVING | StepName.DRAIN | StepName.SLEEP | StepName.DETACH
            | StepName.VERIFY | StepName.DROP_CELLS | StepName.CONNECT | StepName.SEEK
            | StepName.CHECKPOINT
        ):  # fmt: skip
            raise AssertionError("carried out above")
        case _ as unreachable:
            assert_never(unreachable)
    return 0, ""


async def _start_frontend(local: LocalInstance) -> None:
    record = local.record
    deadline_s, port = local.site.deadlines.start_frontend, record.port
    if record.frontend is not None and not await processes.end(record.frontend, grace_s=0):  # it hangs, or is dead already
        raise StepFailed("unkillable", f"the frontend, pid {record.frontend.pid}, outlives SIGKILL")
    try:
        process, _ = await local.frontend.start(port, deadline_s=deadline_s)
    except FrontendGone:
        if not port:
            raise
        process, _ = await local.frontend.start(0, deadline_s=deadline_s)  # somebody has taken the old port meanwhile
        local.moved = True
    local.watch("frontend", process)
    local.note(frontend=True, serving=None)
    if local.shelved is not None:
        await local.frontend.read_ahead(local.record.port, local.shelved.source, deadline_s=deadline_s)


async def _prepare(local: LocalInstance, wanted: Wanted, goal: Goal) -> None:
    shelved = local.shelved = await local.site.stock.prepared(goal, _progress(local, StepName.PREPARE))
    engine, found = shelved.model.spec.engine, None
    if local.seen.engine is EngineState.ABSENT:
        found = await asyncio.to_thread(local.site.images.find, wanted.configuration, engine)
    local.reading = Reading(local.site.images.store, found) if found is not None else None
    local.note(prepared=goal, image=found.image if found is not None else None, own_layout=engine in OWN_LAYOUT)
    if engine in OWN_LAYOUT:
        staged = await local.site.stock.found(shelved, wanted.configuration, patience_s=local.site.deadlines.pool)
        local.note(staged=(goal, staged.weight_set) if staged is not None else None)


async def _stage(local: LocalInstance, goal: Goal) -> int:
    assert local.shelved is not None
    staged = await local.site.stock.staged(
        local.shelved, _progress(local, StepName.STAGE), patience_s=local.site.deadlines.pool
    )
    local.note(staged=(goal, staged.weight_set))
    return staged.read_bytes


async def _deposit(local: LocalInstance, wanted: Wanted, goal: Goal) -> int:
    assert local.shelved is not None
    local.note(verified=False)  # it may read them into memory of its own, and that stays until others are attached
    staged = await occupancy.deposit(local, local.shelved.source, form=wanted.configuration)
    local.site.stock.tell(local.shelved, staged)
    local.note(staged=(goal, staged.weight_set))
    return staged.read_bytes


async def _serve(local: LocalInstance, goal: Goal, grant: int) -> None:
    shelved = local.shelved
    assert shelved is not None
    what = {
        "model": goal.model, "revision": goal.revision, "grant": grant, "weight_set": local.seen.attached,
        "source": str(shelved.source), "context_tokens": shelved.facts.context_tokens, "engine": shelved.model.spec.engine,
    }  # fmt: skip
    status = await local.frontend.serve(local.record.port, what, deadline_s=local.site.deadlines.serve)
    served = Served(goal.model, goal.revision, grant)
    if status.serving != served:
        raise StepFailed("frontend_failed", f"the frontend serves {status.serving} where {served} was asked for")
    local.note(serving=served)


def _progress(local: LocalInstance, step: StepName) -> Callable[[int, int], None]:
    return lambda done, total: local.site.board.show(local.instance, step.value, done, total)
