"""What a vLLM engine core does around its image: it lets go of what can't be written to disk, or must not be."""

from typing import Any

import torch

from worker import gpus


def scrub(core: Any) -> None:
    """Callers' texts never were here; their ids go, and sockets, and the driver's files. Asleep, nothing mapped."""
    runner = core.model_executor.driver_worker.worker.model_runner
    ids = getattr(getattr(runner, "input_batch", None), "token_ids_cpu", None)
    if ids is not None:
        ids.fill(0)  # the rows of a batch keep the last ids that were in them
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1:
        torch.distributed.destroy_process_group()  # of one member, for nothing but its sockets
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        gpus.leave()


def revived() -> None:
    torch.cpu._init_amx()  # the kernel's permission, per process, and not part of an image
