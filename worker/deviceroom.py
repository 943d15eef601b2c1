"""Whether a GPU has room for an engine, looked at before one is started: finding it out costs it half a minute."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from controlplane.quantities import need_and_limit
from worker import gpus
from worker.engines.vllm_faults import users
from worker.failure import StepFailed

WAIT_S: Final = 3.0
"""Drivers give memory back a moment after its process has ended."""
RETRY_S: Final = 0.1


async def see_room(devices: Sequence[str], need_bytes: int) -> None:
    """Raises StepFailed (`device_full`, with both numbers and who has the memory)."""
    until = time.monotonic() + WAIT_S
    for device in devices:
        while (free := await asyncio.to_thread(gpus.free_bytes, device)) < need_bytes:
            if time.monotonic() > until:
                who = users(await asyncio.to_thread(gpus.processes, device))
                need, has = need_and_limit(need_bytes, free)
                raise StepFailed(
                    "device_full",
                    f"its engine needs {need} of {device} to start, {has} are free there; it is {who}: end "
                    "what is not this plane's, or use another GPU",
                )
            await asyncio.sleep(RETRY_S)
