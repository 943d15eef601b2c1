"""The step that has the pool fill a device while the engine that will map the set is still on its way there."""

import asyncio
from typing import Final

import structlog

from pool.client import Attachment, PoolRefused
from pool.devicelink import attach_device
from worker.local import LocalInstance

OUR_SHARE: Final = 0.9
"""Of the step's deadline; beyond it the climb goes on without."""

log = structlog.get_logger("filling")


async def fill(local: LocalInstance) -> int:
    """Have the pool fill the cells' device with the staged set; returns the bytes copied.

    The engine's own mapping finds it there. Whatever hinders that is found out, and said, by that mapping.
    """
    staged, device = local.seen.staged, local.record.device
    assert staged is not None
    assert device is not None
    local.unfill()
    socket = local.site.plane.pool_socket
    filling = asyncio.create_task(asyncio.to_thread(attach_device, socket, staged[1], device, lambda attached, fds: None))
    try:
        async with asyncio.timeout(local.site.deadlines.fill * OUR_SHARE):
            kept = await asyncio.shield(filling)
    except (PoolRefused, OSError) as error:  # too late, too: who comes is not held up by it
        filling.add_done_callback(_let_go)
        log.warning("not_filled", instance=local.instance, weight_set=staged[1], reason=str(error))
        local.note(filled=staged[1])
        return 0
    except asyncio.CancelledError:
        filling.add_done_callback(_let_go)
        raise
    kept.close_fds()
    local.filling = kept
    local.note(filled=staged[1])
    return kept.filled.copied_bytes if kept.filled is not None else 0


def _let_go(filling: "asyncio.Task[Attachment]") -> None:
    if not filling.cancelled() and filling.exception() is None:
        filling.result().close()
