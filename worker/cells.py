"""Steps that take the cells of a grant for an instance, and give them back: locks on files, kept by its holder."""

import asyncio

from worker.desired import Wanted
from worker.failure import StepFailed
from worker.holderlink import HolderDenied, HolderGone
from worker.local import LocalInstance
from worker.locks import CellConflict, Share
from worker.moves import EngineState

RETRY_S = 0.05


async def take_cells(local: LocalInstance, wanted: Wanted) -> None:
    """Lock the granted cells and hand the locks to the holder.

    Raises StepFailed (`cell_locked`, `cell_fenced`, `fenced`; `wrong_device` for a skeleton that lives on another GPU).
    """
    grant, record, ranks = wanted.grant, local.record, tuple(one.device for one in wanted.grants)
    if grant is None:
        raise StepFailed("fenced", "the grant of this directive has been returned")
    started = local.seen.engine in (EngineState.STARTING, EngineState.CONNECTED)
    stays = started or bool(record.members and local.seen.engine is EngineState.CHECKPOINTED)  # alone it may change its GPU
    if local.seen.own_layout and stays and record.devices != ranks:
        here, there = " and ".join(record.devices), " and ".join(ranks)
        raise StepFailed("wrong_device", f"this skeleton was started on {here}; its grant is of {there}")
    shares = [Share(one.device, tuple(range(one.offset, one.offset + one.cells)), one.number) for one in wanted.grants]
    ends = asyncio.get_running_loop().time() + local.site.deadlines.take_cells * 0.9
    while True:
        try:
            cells = local.site.locks.take(shares, instance=local.instance)
            break
        except CellConflict as conflict:
            if conflict.code != "cell_locked" or asyncio.get_running_loop().time() > ends:
                raise StepFailed(conflict.code, str(conflict)) from conflict
            await asyncio.sleep(RETRY_S)  # its last holder is on its way out
    try:
        held = await local.holder.take_cells(grant.number, cells)
    except HolderDenied as error:
        raise StepFailed(error.code, error.message) from error
    except HolderGone as error:
        raise StepFailed("holder_died", str(error)) from error
    finally:
        cells.close()
    local.directory.edit(device=grant.device, ranks=ranks if len(ranks) > 1 else ())
    local.note(grant=held.grant, device=grant.device if local.seen.own_layout or record.pretends else None)


async def drop_cells(local: LocalInstance) -> None:
    local.unfill()  # what the pool fills there is for an engine that will not map it under these
    try:
        held = await local.holder.drop_cells()
    except HolderGone as error:
        raise StepFailed("holder_died", str(error)) from error
    local.note(grant=held.grant)
