"""Steps that take, use and give back device memory. Each one's check: the engine's word and the measured memory agree."""

import asyncio
from pathlib import Path

from controlplane.quantities import human_bytes, need_and_limit
from pool.messages import Staged
from pool.ranks import JOINT
from worker.desired import Wanted
from worker.engines.messages import Attach, Detach, Drain, Health, Sleep, Stage, State, Stocked, Wake
from worker.failure import StepFailed
from worker.local import LocalInstance
from worker.moves import Goal
from worker.observe import mapped
from worker.service import FrontendGone

CELLS = 8
RETRY_S = 0.05
HANDED_S = 0.02
"""What the frontend holds reaches its engine within a socket's way, or within 50 ms if that has yet to connect."""
RESTAGED = 3
"""A set may leave between its staging and its mapping; a pool that keeps losing it has another trouble."""
ANSWER_S = 2.0
"""What an engine's answer may take beyond the deadline that it was given itself."""
KEPT_FRACTION = 0.5
KEPT_BYTES = 128 << 20
"""A first wake leaves heaps and thread stacks behind, some tens of MiB; a KV that was not freed is more than half its size."""


async def attach(local: LocalInstance) -> int:
    """Map the staged weight set; return its bytes. Raises StepFailed (`memory_disagrees`, the engine's or pool's code)."""
    assert local.seen.staged is not None
    command = Attach(pool_socket=local.site.plane.pool_socket, weight_set=local.seen.staged[1])
    local.note(verified=False)
    try:
        state = await _attached(local, command)
    except StepFailed as failure:
        if failure.code == "unknown_set" and local.restaged < RESTAGED:  # it left the pool after it was staged
            local.restaged += 1
            local.take(await local.tell(Health(), local.site.deadlines.attach))
            local.note(staged=None)
            return 0
        raise
    if local.seen.own_layout:
        await _agree_on_device(local, state, command.weight_set)
        local.note(checked=command.weight_set in local.record.checked_sets)
    else:
        found = await asyncio.to_thread(mapped, _pid(local), local.site.data)
        if state.attached != command.weight_set or found < state.bytes_mapped:
            says, there = need_and_limit(state.bytes_mapped, found)
            raise StepFailed(
                "memory_disagrees", f"the engine says that {says} of {state.attached} are mapped; the kernel says {there}"
            )
    local.take(state)
    local.unfill()
    local.restaged = 0
    return state.bytes_mapped


async def _agree_on_device(local: LocalInstance, state: State, weight_set: str) -> None:
    """Imported memory shows in no process's maps: here the pool's word stands against the engine's."""
    devices = local.record.devices
    described = await local.site.stock.described()
    resident = {(one.device, name) for one in described.devices for name in one.sets} if described else None
    parts = set(zip(devices, weight_set.split(JOINT), strict=False))
    if state.attached != weight_set or state.bytes_own or (resident is not None and not parts <= resident):
        has = ", ".join(sorted(name for device, name in resident or () if device in devices)) or "nothing"
        raise StepFailed(
            "memory_disagrees",
            f"the engine says that {human_bytes(state.bytes_mapped)} of {state.attached} are mapped and "
            f"{human_bytes(state.bytes_own)} are its own; the pool has {has} on {' and '.join(devices)}",
        )


async def deposit(local: LocalInstance, source: Path, *, form: str) -> Staged:
    """Have the skeleton bring a source's weights into the pool. Raises StepFailed with the engine's or the pool's code."""
    command = Stage(pool_socket=local.site.plane.pool_socket, source=str(source), form=form)
    ends = asyncio.get_running_loop().time() + local.site.deadlines.pool
    while True:
        try:
            reply = await local.ask(command, local.site.deadlines.deposit)
            break
        except StepFailed as failure:
            if failure.code != "pool" or asyncio.get_running_loop().time() > ends:
                raise
        await asyncio.sleep(RETRY_S)  # the weights are still the engine's: it brings them to the next daemon
    if not isinstance(reply, Stocked):
        raise StepFailed("protocol", f"the engine answered Stage with {type(reply).__name__}")
    local.take(await local.tell(Health(), local.site.deadlines.attach))
    return Staged(
        weight_set=reply.weight_set, size_bytes=reply.size_bytes, took_ms=round(reply.took_ms), read_bytes=reply.read_bytes
    )


async def _attached(local: LocalInstance, command: Attach) -> State:
    ends = asyncio.get_running_loop().time() + local.site.deadlines.attach * 0.9
    while True:
        try:
            return await local.tell(command, local.site.deadlines.attach)
        except StepFailed as failure:
            if failure.code != "pool" or asyncio.get_running_loop().time() > ends:
                raise
        await asyncio.sleep(RETRY_S)  # the daemon is away; the next one adopts its sets


async def wake(local: LocalInstance, goal: Goal, wanted: Wanted) -> None:
    """Raises StepFailed: `no_room` when the engine uses more than its cells have, with both numbers."""
    state = await local.tell(Wake(model=goal.model), local.site.deadlines.wake)
    local.directory.edit(woken=(goal.model, goal.revision))
    local.take(state)
    local.note(woken_for=goal, drained=False, sought=False, kept=None)
    if not state.awake:
        raise StepFailed("failed", "the engine answered the wake and is not awake")
    used = used_bytes(state)
    cells = sum(grant.cells for grant in wanted.grants)
    share = sum(local.site.size_of(grant.device) * grant.cells // CELLS for grant in wanted.grants)
    if share and used > share:
        uses, has = need_and_limit(used, share)
        weights, kv, private = map(human_bytes, (state.bytes_mapped, state.bytes_kv, state.bytes_private))
        raise StepFailed(
            "no_room",
            f"{goal.model} uses {uses} (weights {weights}, KV {kv}, all private memory {private}), its {cells} cells have "
            f"{has}: give it a larger share",
        )


async def drain(local: LocalInstance) -> None:
    """Let requests end by themselves; abort the rest after the deadline, with a typed error to their callers."""
    deadlines = local.site.deadlines
    try:
        await _run_out(local)
    except StepFailed as failure:
        if failure.code != "drain_timeout":
            raise
        try:
            await local.frontend.stop_serving(local.record.port, deadline_s=deadlines.stop_serving, abort=True)
        except FrontendGone as error:
            raise StepFailed("drain_timeout", f"{failure.message}, and they can't be aborted: {error}") from error
        await local.tell(Drain(deadline_ms=round(deadlines.abort * 1000)), deadlines.abort + ANSWER_S)
    local.note(drained=True)


async def _run_out(local: LocalInstance) -> None:
    """Wait until engine *and* frontend have nothing left: what the frontend was given a moment ago may be on its way still.

    Raises StepFailed (`drain_timeout`).
    """
    clock = asyncio.get_running_loop().time
    ends = clock() + local.site.deadlines.drain
    while True:
        left = max(0.0, ends - clock())
        await local.tell(Drain(deadline_ms=round(left * 1000)), left + ANSWER_S)
        try:
            running = (await local.frontend.status(local.record.port)).running
        except FrontendGone:  # what it had is in the engine or in its record, and its successor takes no new request
            return
        if not running:
            return
        if not left:
            raise StepFailed("drain_timeout", f"{running} requests still wait for the engine")
        await asyncio.sleep(HANDED_S)


async def sleep(local: LocalInstance) -> None:
    local.take(await local.tell(Sleep(), local.site.deadlines.sleep))


async def detach(local: LocalInstance) -> None:
    local.take(await local.tell(Detach(), local.site.deadlines.detach))


async def verify(local: LocalInstance) -> None:
    """See that the memory is free, waiting for what is given back late. Raises StepFailed (`memory_kept`, with the numbers)."""
    skeleton = local.record.skeleton_bytes
    ends = asyncio.get_running_loop().time() + local.site.deadlines.verify * 0.9
    while True:
        state = await local.tell(Health(), local.site.deadlines.attach)
        left = 0 if local.seen.own_layout else await asyncio.to_thread(mapped, _pid(local), local.site.data)
        fault = _kept(state, left, skeleton, local.kv_bytes)
        if fault is None:
            local.take(state)
            local.note(verified=True)
            return
        if asyncio.get_running_loop().time() > ends:
            raise StepFailed("memory_kept", fault)
        await asyncio.sleep(RETRY_S)


def _kept(state: State, left: int, skeleton: int, kv: int) -> str | None:
    if state.attached is not None or state.bytes_mapped or left:
        said, seen = need_and_limit(state.bytes_mapped, left)
        return f"the engine still maps {state.attached}: {said} by its own word, {seen} by the kernel's"
    if state.bytes_own:
        return f"the engine still has {human_bytes(state.bytes_own)} of weights in memory of its own"
    if state.awake or state.bytes_kv:
        return f"the engine still has {human_bytes(state.bytes_kv)} of KV memory"
    if kv and state.bytes_private > skeleton + kv * KEPT_FRACTION + KEPT_BYTES:
        has, had = need_and_limit(state.bytes_private, skeleton)
        return f"the engine has {has} of private memory; its skeleton had {had} before it took {human_bytes(kv)} of KV"
    return None


def used_bytes(state: State) -> int:
    """All that the engine uses of its device: its own memory and what it maps."""
    return state.bytes_private + state.bytes_mapped


def _pid(local: LocalInstance) -> int:
    engine = local.record.engine
    if engine is None:
        raise StepFailed("engine_died", "there is no engine")
    return engine.pid
