"""Steps that take an engine off its GPU and put it back. The engine is parked all the while: nobody asks it anything.

The rules, each learned the hard way: imported memory must be unmapped before (else the checkpoint "succeeds" and the process
is lost at its restore); memory must be free before a restore (one that fails poisons the process for good); each driver call
is made by a step process with a deadline, since one that hangs can't be cancelled.
"""

import asyncio
import time
from typing import Final

import structlog

from controlplane.quantities import human_bytes, need_and_limit
from controlplane.rungs import NOT_CHECKPOINTABLE
from worker import gpus, hostmemory, parked, processes, ranks
from worker.cuda.operation import Operation, Theatre, not_wanted
from worker.cuda.surgeon import CudaState, exchanged
from worker.engines.interface import OWN_LAYOUT
from worker.engines.messages import Moved
from worker.failure import StepFailed
from worker.instancedir import Record
from worker.local import LocalInstance
from worker.moves import EngineState
from worker.parts import Parts

DOWN: Final = ("lock", "checkpoint", "state")
UP: Final = ("restore", "unlock")
POLL_S: Final = 0.005
FREE_S: Final = 5.0
"""Memory that was given back a moment ago may still be on its way to the driver."""
MARGIN_BYTES: Final = 256 << 20
MARGIN_PART: Final = 64
"""Beside what it had there: the driver's own, which grows with what is mapped; of a small device no more than this part."""
HOST_SHARE: Final = 1.1
"""Of what it has on the device goes to the host, with a little of the driver's beside it."""
REST_S: Final = 5.0
REST_PART: Final = 1 / 3
"""Of a step's deadline is kept for what follows the driver's calls, but no more than `REST_S`: a fall back kills and reaps."""

log = structlog.get_logger("checkpoint")


def theatre(local: LocalInstance) -> Theatre | None:
    """Who is asked about the engine's CUDA state; None: it holds no GPU."""
    record = local.directory.read()
    if record is None:
        return None
    if record.kind in OWN_LAYOUT and (local.site.is_gpu(record.device) or local.site.is_gpu(record.left_device)):
        return Theatre()
    return Theatre(local.site.data / "run" / "twin", record.fault) if record.pretends else None


async def down(local: LocalInstance, parts: Parts) -> None:
    """Park it, take it off the GPU, and weigh it. Raises StepFailed, as `take_off`."""
    await take_off(local, parts)
    with parts.of("weigh"):
        await weigh(local)


async def take_off(local: LocalInstance, parts: Parts) -> None:
    """Park it and take it off the GPU. The step process gets ready meanwhile.

    Raises StepFailed: `not_available`, `not_drained`, `still_mapped`, `not_checkpointable` (nothing was done),
    `no_memory`, the driver's code, `step_deadline`, `memory_kept`.
    """
    where = theatre(local)
    if where is None:
        raise StepFailed("not_available", "this engine holds no GPU that it could be taken off")
    _refuse(local)
    ends = _drivers_end(local.site.deadlines.checkpoint)
    record = await _with_members(local)
    await asyncio.to_thread(_host_has_room, record.skeleton_bytes)
    readying = asyncio.create_task(Operation.prepare(where, DOWN))
    try:
        with parts.of("park"):
            await parked.asked(local, lambda: local.holder.park(deadline_s=local.site.deadlines.checkpoint / 3))
        pids = await parked.pids(local)
        with parts.of("cuda_ready"):
            operation = await asyncio.shield(readying)
    except BaseException:
        not_wanted(readying)
        raise
    with parts.of("cuda_checkpoint"):
        said = await operation.carry_out(pids, max(0.0, ends - time.monotonic()))
    await operation.end()
    for one in said[-len(pids) :]:
        if one.state is not CudaState.CHECKPOINTED:
            raise StepFailed("cuda_failed", f"the checkpoint of pid {one.pid} succeeded, and the driver says {one.state}")
    for device, pid in zip(record.devices, pids, strict=False) if where.twin is None else ():
        if left := await asyncio.to_thread(gpus.used_by, device, pid):
            raise StepFailed("memory_kept", f"checkpointed, the engine still has {human_bytes(left)} of {device}")
    local.engine_state = None
    local.directory.edit(left_device=record.device)
    local.note(engine=EngineState.CHECKPOINTED, awake=False, attached=None, loaded=False, drained=True, verified=True)


async def weigh(local: LocalInstance) -> None:
    """Measure what it takes of the host, now that nothing of it is on a device."""
    if (record := local.directory.read()) is not None and record.engine is not None:
        local.host_bytes = await asyncio.to_thread(hostmemory.taken_by, record.engine.pid)
        local.weighed_s = time.monotonic()


def _refuse(local: LocalInstance) -> None:
    seen, state = local.seen, local.engine_state
    if seen.awake or (state is not None and (state.running or state.bytes_kv)):
        raise StepFailed("not_drained", "the engine is awake, or has requests or KV memory: drain it and put it to sleep first")
    if seen.attached is not None or seen.loaded or not seen.verified or (state is not None and state.bytes_mapped):
        raise StepFailed(
            "still_mapped",
            f"{seen.attached or 'memory of weights'} is mapped, or was not seen to be gone: a process that imports memory "
            "can't come back from a checkpoint",
        )


async def _with_members(local: LocalInstance) -> Record:
    """Who its ranks are, looked up while they are on their GPUs. Raises StepFailed (`not_checkpointable`)."""
    record = local.record
    if not record.ranks or len(record.members) == len(record.ranks):
        return record
    found = await asyncio.to_thread(ranks.members, record)
    if len(found) != len(record.ranks):
        raise StepFailed(NOT_CHECKPOINTABLE, f"of {len(record.ranks)} ranks the processes of {len(found)} were found")
    return local.directory.edit(members=found)


def _host_has_room(need: int) -> None:
    wanted, free = int(need * HOST_SHARE), hostmemory.available_bytes()
    if free < wanted:
        needs, has = need_and_limit(wanted, free)
        raise StepFailed("no_memory", f"what the engine has on its GPU needs {needs} of the host, which has {has}")


async def up(local: LocalInstance) -> None:
    """Back on the GPU of its cells, released, connected. A failure is no failure of the climb: the process is gone then, and an
    image or a cold start follows.

    Raises StepFailed (`holder_died`; `no_device_memory`, with both numbers: nothing was done, and it can stay as it is).
    """
    where, device, engine = theatre(local), local.record.device, local.record.engine
    assert where is not None
    await _room(local, where)
    local.unwatch("engine")  # its death on the way is no loss: another one follows
    try:
        await _back(local, where)
        if engine is not None:
            local.watch("engine", engine)
    except StepFailed as failure:
        if failure.code == "holder_died":
            raise
        log.warning("cuda_restore_failed", instance=local.instance, code=failure.code, message=failure.message, device=device)
        await fall_back(local, failure)


async def _back(local: LocalInstance, where: Theatre) -> None:
    record, deadline_s = local.record, local.site.deadlines.cuda_restore
    ends = _drivers_end(deadline_s)
    was = record.left_device or record.device
    devices = exchanged(was, record.device, [one.uuid for one in await asyncio.to_thread(gpus.gpus)])
    if devices:
        local.stand_down()  # one that was got ready would bring it back to where it was
    pids = await parked.pids(local)
    operation = await (_readied(local) or Operation.prepare(where, UP, devices=devices))
    await operation.carry_out(pids, max(0.0, ends - time.monotonic()))
    try:
        await parked.release(local, max(0.0, ends + _rest_s(deadline_s) / 2 - time.monotonic()))  # a fall back needs some, too
    finally:
        await operation.end()
    if was != record.device and record.device is not None and record.kind in OWN_LAYOUT:
        local.take(await local.tell(Moved(device=record.device), local.site.deadlines.attach))
    local.directory.edit(left_device=None, checked=False, checked_sets=(), woken=None)


def _drivers_end(deadline_s: float) -> float:
    """When the driver's calls must have ended, of a step that begins now; monotonic, in seconds."""
    return time.monotonic() + deadline_s - _rest_s(deadline_s)


def _rest_s(deadline_s: float) -> float:
    return min(REST_S, deadline_s * REST_PART)


def get_ready(local: LocalInstance, was: str) -> None:
    """Have the step process of a restore get ready while CRIU still works: that takes 0.15 s."""
    if local.readying is None and local.site.is_gpu(was) and was == local.record.device:
        local.readying = asyncio.create_task(Operation.prepare(Theatre(), UP))


def _readied(local: LocalInstance) -> "asyncio.Task[Operation] | None":
    readying, local.readying = local.readying, None
    return readying


async def _room(local: LocalInstance, where: Theatre) -> None:
    record = local.record
    if where.twin is not None or record.device is None:
        return
    ends = asyncio.get_running_loop().time() + FREE_S
    for device in record.devices:
        margin = min(MARGIN_BYTES, local.site.size_of(device) // MARGIN_PART)
        need = record.skeleton_bytes // len(record.devices) + margin  # ranks are alike
        while (free := await asyncio.to_thread(gpus.free_bytes, device)) < need:
            if asyncio.get_running_loop().time() > ends:
                local.stand_down()
                needs, has = need_and_limit(need, free)
                raise StepFailed("no_device_memory", f"the engine needs {needs} of {device} to come back, {has} are free")
            await asyncio.sleep(POLL_S * 10)


async def fall_back(local: LocalInstance, failure: StepFailed) -> None:
    """The process is lost. Kill it, see that it is gone, and go on from its image, if it did not come from there just now."""
    images, record = local.site.images, local.record
    local.unwatch("engine")
    await parked.asked(local, lambda: local.holder.kill(0))
    for one in (record.engine, *record.members):
        if one is not None and not await processes.end(one, grace_s=0):
            raise StepFailed("unkillable", f"pid {one.pid} of the engine outlives SIGKILL")
    found = None
    if local.restored_from is None:
        found = await asyncio.to_thread(images.find, record.configuration, record.kind)
    elif failure.code not in BLAMELESS:
        await asyncio.to_thread(
            images.fail, local.restored_from, record.configuration, "restore", failure.code, failure.message
        )
    local.restored_from = None
    local.directory.edit(engine=None, left_device=None, unproven=None, members=())
    local.note(
        engine=EngineState.ABSENT, image=found.image if found is not None else None, attached=None, awake=False, checked=False,
        woken_for=None, verified=True,
    )  # fmt: skip


BLAMELESS: Final = frozenset({"cuda_out_of_memory", "step_deadline", "cuda_not_supported"})
"""Failures of a CUDA restore that say nothing of the image that the process came from."""
