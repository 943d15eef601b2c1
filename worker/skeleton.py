"""Steps that make and end an instance's processes."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

from controlplane.arguments import shaping
from controlplane.fleet.reach import holds_gpu
from controlplane.spec import Argument
from worker import processes
from worker.cuda.twin import FAULTS
from worker.deviceroom import see_room
from worker.engines.messages import Health, Shutdown
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderGone
from worker.holdermessages import Held
from worker.instancedir import Record
from worker.local import LocalInstance
from worker.moves import EngineState, Observed
from worker.processes import Process
from worker.service import FrontendGone

CONNECT_POLL_S = 0.025
LAST_LINES_S = 2.0
"""After an engine's death its frontend tells every caller; they have this long to hear it."""
FRONTEND_GRACE_S = 4.0
HOLDER_GRACE_S = 3.0
WARDEN_S = 5.0
"""What a restore has brought to life may have tens of GiB, to be freed at its end."""

log = structlog.get_logger("skeleton")


async def start_holder(local: LocalInstance) -> None:
    """Raises StepFailed (`start_failed`)."""
    try:
        saves = not local.site.images.hindrance  # what is restored may outlive a holder; other engines die with theirs
        holder, held = await local.holder.open(
            deadline_s=local.site.deadlines.start_holder, warden=saves, spare=local.site.spare
        )
    except HolderGone as error:
        words = ""
        with contextlib.suppress(FileNotFoundError):  # a spare one writes there only once it has settled in
            words = local.directory.log("holder").read_text(encoding="utf-8", errors="replace")[-1000:]
        raise StepFailed("start_failed", f"{error}; it said: {words or 'nothing'}") from error
    local.watch("holder", holder)
    local.note(holder=True, present=True, grant=held.grant)


async def start_engine(local: LocalInstance) -> None:
    """Raises StepFailed (`start_failed`)."""
    shelved = local.shelved
    assert shelved is not None, "prepared before"
    spec = shelved.model.spec
    told = shaping(spec.engine, spec.arguments)
    if local.seen.own_layout:
        told["max_model_len"] = shelved.facts.context_tokens  # which its configuration is about, asked for or not
    if shelved.draft is not None:
        told["draft_model"] = str(shelved.draft)
    arguments = msgspec.json.encode(told).decode()
    local.directory.edit(started=await asyncio.to_thread(local.site.images.started, local.record.configuration, spec.engine))
    if local.seen.own_layout:
        await see_room(local.record.devices, (shelved.facts.weight_bytes + shelved.facts.kv_bytes) // spec.gpus)
    argv = (
        sys.executable, "-P", "-m", "worker.engines.process", "--instance-dir", str(local.directory.path),
        "--engine", spec.engine, "--source", str(shelved.source), "--arguments", arguments,
        "--artefacts", str(local.site.data / "artefacts"), *_on_device(local),
    )  # fmt: skip
    local.directory.edit(  # before there is one: should this worker die now, the next one knows what it finds
        kind=spec.engine, checked=False, checked_sets=(), woken=None, left_device=None, unproven=None, members=(),
        skeleton_bytes=0, **pretence(spec.engine, spec.arguments),
    )  # fmt: skip
    try:
        held = await _started(local, argv)
    except HolderDenied as error:
        raise StepFailed(error.code, error.message) from error
    except HolderGone as error:
        raise StepFailed("holder_died", str(error)) from error
    assert held.engine is not None
    local.directory.edit(unread=False)  # not before: till now it may have been one that a worker that is gone brought back
    local.watch("engine", held.engine)
    own_layout = local.seen.own_layout
    device = local.seen.device if own_layout else None
    local.note(engine=EngineState.STARTING, checked=False, woken_for=None, verified=not own_layout, device=device)


async def _started(local: LocalInstance, argv: tuple[str, ...]) -> Held:
    """Raises HolderDenied, HolderGone."""
    try:
        return await local.holder.start(argv)
    except HolderDenied as error:
        if error.code != "started_already":
            raise
    held = await local.holder.ask()
    if held.engine is None or held.parked:  # a worker that is gone had begun to bring one back, or has
        await local.holder.kill(0)
        held = await local.holder.start(argv)
    else:
        local.directory.edit(started=None)  # not by us
    return held


def _on_device(local: LocalInstance) -> tuple[str, ...]:
    """Where a skeleton on a GPU is started, for good, and whether it need read no weights. Raises StepFailed."""
    assert local.shelved is not None
    ranks = local.shelved.model.spec.gpus
    if not local.seen.own_layout:
        return ("--ranks", str(ranks)) if ranks > 1 else ()
    devices = local.record.devices
    if len(devices) != ranks or not all(map(local.site.is_gpu, devices)):
        has = " and ".join(devices) or "no device"
        raise StepFailed("wrong_device", f"its cells are of {has}, which is not {ranks} of this node's GPUs")
    device = ",".join(devices)
    return ("--device", device) if local.seen.staged is None else ("--device", device, "--bare")


def pretence(engine: str, arguments: Mapping[str, Argument]) -> dict[str, Any]:
    """What of the record says that an engine pretends to hold a GPU."""
    if engine != "fake" or not holds_gpu(engine, arguments):
        return {"pretends": False, "fault": ""}
    fault = str(arguments.get("fail", ""))
    return {"pretends": True, "fault": fault if fault.partition(":")[0] in FAULTS else ""}


async def connect(local: LocalInstance) -> None:
    """Wait until the engine has built its skeleton and connected. Raises StepFailed (`start_failed`, with its last words)."""
    while True:
        try:
            held = await local.holder.ask()
        except HolderGone as error:
            raise StepFailed("holder_died", str(error)) from error
        if held.exit is not None:
            raise StepFailed("start_failed", f"the engine ended with status {held.exit.status}: {local.directory.last_words()}")
        if held.connected:
            break
        await asyncio.sleep(CONNECT_POLL_S)
    state = await local.tell(Health(), local.site.deadlines.attach)
    least = local.record.skeleton_bytes if local.record.ranks else 0  # one that was caught off its GPUs has no graphs now
    local.directory.edit(skeleton_bytes=max(least, state.bytes_private - state.bytes_own))
    local.take(state)
    local.note(engine=EngineState.CONNECTED)


async def end_engine(local: LocalInstance) -> None:
    """Ask it to shut down, then SIGTERM, then SIGKILL; at once when it is on disk. Its death is the check."""
    local.ending = True
    at_once = local.seen.kept or local.seen.engine is EngineState.CHECKPOINTED
    grace_s = 0 if at_once else local.site.deadlines.end_engine
    if grace_s and local.seen.engine is EngineState.CONNECTED:
        try:
            await local.tell(Shutdown(), grace_s)
        except StepFailed as failure:
            log.info("shutdown_not_heard", instance=local.instance, code=failure.code, message=failure.message)
    try:
        await local.holder.kill(grace_s)
    except (HolderGone, HolderDenied) as error:
        log.info("holder_gone_at_end", instance=local.instance, reason=str(error))  # `clear` ends what is left, by pid
    local.note(engine=EngineState.DEAD, awake=False, attached=None, serving=None)


async def clear(local: LocalInstance) -> None:
    """End every process of the instance, see that all are gone, remove the directory.

    Raises StepFailed (`unkillable`) when a process outlives SIGKILL: then its memory is not free and nothing may say so.
    """
    local.ending = True
    record = local.directory.read()
    if record is not None:
        with contextlib.suppress(HolderGone, HolderDenied):
            await local.holder.kill(0)
        await _end_engine_by_pid(record)
        await _end_frontend(local, record)
        with contextlib.suppress(HolderGone, HolderDenied):
            await local.holder.leave()
        left = [p for p in (record.holder, local.record.holder) if p and not await processes.end(p, grace_s=HOLDER_GRACE_S)]
        if left:
            raise StepFailed("unkillable", f"the holder, pid {left[0].pid}, outlives SIGKILL")
        above = local.record.warden
        if above is not None and not await processes.gone(above, WARDEN_S):
            raise StepFailed("unkillable", f"pid {above.pid} still waits for the end of what the holder has left behind")
    local.forget()
    try:
        local.directory.keep_log(local.logs)
    except OSError as error:  # what an engine has said is not worth its cells
        log.warning("engine_log_lost", instance=local.instance, reason=str(error))
    local.directory.remove()
    local.seen = Observed()


async def _end_engine_by_pid(record: Record) -> None:
    engine = record.engine
    if engine is None or engine.boot != processes.boot_id():
        return
    for process in (engine, *_left_of(engine)):
        if not await processes.end(process, grace_s=0):
            raise StepFailed("unkillable", f"pid {process.pid} of the engine outlives SIGKILL")


def _left_of(engine: Process) -> list[Process]:
    # While a session has members its number is not given to a new process: these are the engine's own, unless its pid is
    # another's by now, who has begun a session of that number after the engine's was empty.
    left = [process for process in processes.in_session(engine.pid) if process.started >= engine.started]
    return left if processes.identify(engine.pid) in (engine, None) else []


async def _end_frontend(local: LocalInstance, record: Record) -> None:
    frontend = record.frontend
    if frontend is None or not processes.alive(frontend):
        return
    with contextlib.suppress(TimeoutError, FrontendGone):
        async with asyncio.timeout(LAST_LINES_S):
            while (await local.frontend.status(record.port)).running:  # noqa: ASYNC110 (another process's state)
                await asyncio.sleep(CONNECT_POLL_S)
    if not await processes.end(frontend, grace_s=FRONTEND_GRACE_S):
        raise StepFailed("unkillable", f"the frontend, pid {frontend.pid}, outlives SIGKILL")
