"""What an earlier worker left of one instance, found out."""

from worker import checkpoint, instancedir, parked
from worker.cuda.operation import STATE_S, operate
from worker.cuda.surgeon import CudaState
from worker.engines.interface import OWN_LAYOUT
from worker.engines.messages import Health
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderGone
from worker.instancedir import Record
from worker.local import LocalInstance
from worker.moves import EngineState, Goal, Observed
from worker.service import FrontendGone


async def adopt(local: LocalInstance) -> None:
    """Find out what is there: processes, the engine's own word, what the frontend serves. Changes nothing, but that an engine
    which was caught half off its GPU is let go on."""
    record = local.directory.read()
    if record is None:
        local.seen = Observed(present=local.directory.path.exists())
        return
    alive = instancedir.living(record)
    local.note(present=True, checked=record.checked, woken_for=Goal(*record.woken) if record.woken else None)
    bound = record.kind in OWN_LAYOUT or record.pretends
    local.note(own_layout=record.kind in OWN_LAYOUT, device=record.device if bound else None)
    for role in ("holder", "engine"):
        if role in alive:
            local.watch(role, alive[role])
    await adopt_holder(local, record)
    if "frontend" in alive:
        await _adopt_frontend(local, record.port)
        local.watch("frontend", alive["frontend"])  # behind its word: one that dies just then is dead by the word of the kernel


async def _adopt_frontend(local: LocalInstance, port: int) -> None:
    try:
        status = await local.frontend.status(port)
        local.note(frontend=True, serving=status.serving)
    except FrontendGone:
        local.note(frontend=False)  # hung or half started: it is started anew on its port


async def adopt_holder(local: LocalInstance, record: Record) -> None:
    """The holder and its engine."""
    try:
        held = await local.holder.ask()
    except (HolderGone, HolderDenied):
        dead = EngineState.DEAD if record.engine is not None else EngineState.ABSENT
        local.note(holder=False, engine=dead)
        return
    local.note(holder=True, grant=held.grant)
    if held.engine is None:
        return
    if held.exit is not None:
        local.note(engine=EngineState.DEAD)
    elif held.parked:
        await _adopt_parked(local, held.grant)
    elif not held.connected:
        local.note(engine=EngineState.STARTING, verified=held.grant is None)
    else:
        try:
            local.take(await local.tell(Health(), local.site.deadlines.attach))
            local.note(engine=EngineState.CONNECTED, verified=held.grant is None)
        except StepFailed:
            local.note(engine=EngineState.DEAD)


async def _adopt_parked(local: LocalInstance, grant: int | None) -> None:
    if local.record.unread:  # to compare its image now would hold up this worker's hello; a climb does it beside CRIU
        local.note(engine=EngineState.DEAD)
        return
    try:
        state = await _parked(local)
        local.note(engine=state, verified=state is EngineState.CHECKPOINTED or grant is None)
    except StepFailed:
        local.note(engine=EngineState.DEAD)


async def _parked(local: LocalInstance) -> EngineState:
    """What an engine is that was found parked: a worker died in the middle of something. What can go on is let go on."""
    where = checkpoint.theatre(local)
    if where is None:
        await parked.asked(local, local.holder.release)
        return EngineState.STARTING
    pids = await parked.pids(local)
    states = [said.state for said in await operate(where, pids, ("state",), deadline_s=STATE_S)]
    if set(states) == {CudaState.CHECKPOINTED}:
        if (record := local.record).left_device is None:  # that worker died before it wrote down where it was
            local.directory.edit(left_device=record.device)
        return EngineState.CHECKPOINTED
    if not set(states) <= {CudaState.RUNNING, CudaState.LOCKED}:
        return EngineState.DEAD  # of a gang some are off their GPUs and some are not: they don't find together again
    if locked := [pid for pid, state in zip(pids, states, strict=True) if state is CudaState.LOCKED]:
        await operate(where, locked, ("unlock",), deadline_s=local.site.deadlines.cuda_restore)
    await parked.asked(local, local.holder.release)
    return EngineState.STARTING
