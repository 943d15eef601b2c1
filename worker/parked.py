"""A parked engine, which answers nobody: what there is to know of it its holder says, and it goes on once that lets it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from worker.engines.messages import Health
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderGone
from worker.holdermessages import Held
from worker.local import LocalInstance
from worker.moves import EngineState

POLL_S: Final = 0.005


async def asked(local: LocalInstance, ask: Callable[[], Awaitable[Held]]) -> Held:
    """Ask the instance's holder. Raises StepFailed with its code, or `holder_died`."""
    try:
        return await ask()
    except HolderDenied as error:
        raise StepFailed(error.code, error.message) from error
    except HolderGone as error:
        raise StepFailed("holder_died", str(error)) from error


async def pids(local: LocalInstance) -> tuple[int, ...]:
    """Whom the driver is asked about, as this process sees them: the engine, or a gang's ranks. Raises StepFailed
    (`engine_died`)."""
    held = await asked(local, local.holder.ask)
    if held.engine is None or held.exit is not None:
        raise StepFailed("engine_died", "there is no engine")
    return tuple(member.pid for member in local.record.members) or (held.engine.pid,)


async def release(local: LocalInstance, deadline_s: float) -> None:
    """Let the parked engine go on, and wait for its word. Raises StepFailed."""
    await rejoined(local, await asked(local, local.holder.release), deadline_s)


async def rejoined(local: LocalInstance, held: Held, deadline_s: float) -> None:
    """Wait for the word of an engine that has been released. Raises StepFailed."""
    ends = asyncio.get_running_loop().time() + deadline_s
    while not held.connected:
        if held.exit is not None:
            raise StepFailed("restore_failed", f"the engine ended with status {held.exit.status} after its release")
        if asyncio.get_running_loop().time() > ends:
            raise StepFailed("step_deadline", f"the released engine did not connect within {deadline_s:g} s")
        await asyncio.sleep(POLL_S)
        held = await asked(local, local.holder.ask)
    local.take(await local.tell(Health(), local.site.deadlines.attach))
    local.note(engine=EngineState.CONNECTED, checked=False, woken_for=None, verified=True)
