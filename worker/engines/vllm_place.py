"""Where a vLLM engine is: on one GPU in its own process, or on several, a rank on each."""

import os
from typing import TYPE_CHECKING, Any

from worker import gpus

if TYPE_CHECKING:
    from pool.vllm_backend import PoolBackend
    from worker.engines.vllm_gang import Gang


def alone(core: Any, device: str) -> "PoolBackend":
    """The sleep-mode backend of a core whose worker is in this process; KV memory is given back at once."""
    from pool import vllm_version  # noqa: PLC0415 - not for who only asks where

    worker = core.model_executor.driver_worker.worker
    backend: PoolBackend = vllm_version.sleep_backend(worker)
    backend.bind(worker, "", device)
    backend.kv.release()
    return backend


def gang(core: Any, devices: tuple[str, ...]) -> "Gang":
    """Likewise, of a core whose workers are processes of their own."""
    from worker.engines.vllm_gang import Gang  # noqa: PLC0415 - the pool's client, which one on one GPU needs later

    return Gang(core, devices)


def used_bytes(device: str, ranks: "Gang | None") -> int | None:
    """What the engine uses of its GPUs by the driver's word, all ranks together; None: the driver does not say."""
    if not device:
        return None
    if ranks is None:
        return gpus.used_by(device, os.getpid())
    used = [gpus.used_by(one, pid) for one, pid in zip(device.split(","), ranks.pids, strict=True)]
    return sum(one for one in used if one is not None) if any(one is not None for one in used) else None


def ordinals(devices: tuple[str, ...]) -> str:
    """CUDA's numbers of GPUs, as CUDA_VISIBLE_DEVICES has them. Raises SystemExit for one that is not here.

    An engine on one GPU sees the others behind it and never uses them: once it was moved, memory of the one where it is then
    can only be imported if it was visible at the start ("not initialised" otherwise).
    """
    here = {known.uuid: str(known.index) for known in gpus.gpus()}
    if missing := [device for device in devices if device not in here]:
        raise SystemExit(f"this machine has no GPU {missing[0]!r}; it has {', '.join(here) or 'none'}")
    if len(devices) > 1:
        gpus.leave()  # ranks are forked from here: each must meet the driver's library by itself
    others = [number for device, number in here.items() if device not in devices] if len(devices) == 1 else []
    return ",".join([*(here[device] for device in devices), *others])
