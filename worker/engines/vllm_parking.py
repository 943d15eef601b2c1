"""What a vLLM engine core does around its image: it lets go of what can't be written to disk, or must not be."""

import sys
from typing import Any, Final

import torch

from worker import gpus

PARKED_STACK_BYTES: Final = 16
"""Of each thread that the GPU could run at once (270,336 on an H200), while none runs. At the driver's own 1,024 its stacks are
264 MiB of device memory that every checkpoint takes to the host, and every image to the disk."""


def scrub(core: Any) -> int:
    """Callers' texts never were here; their ids go, and sockets, and the driver's files. Asleep, nothing mapped.

    Return what `revived` wants to know: the size of the GPU's stacks, in bytes a thread; 0 without a GPU.
    """
    runner = core.model_executor.driver_worker.worker.model_runner
    ids = getattr(getattr(runner, "input_batch", None), "token_ids_cpu", None)
    if ids is not None:
        ids.fill(0)  # the rows of a batch keep the last ids that were in them
    _forget_drafts(runner)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1:
        torch.distributed.destroy_process_group()  # of one member, for nothing but its sockets
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    stack_bytes = _shrunk()
    gpus.leave()
    return stack_bytes


def _shrunk() -> int:
    """What the GPU's stacks were at, in bytes a thread; 0 where the driver keeps them as they are, which costs their memory."""
    try:
        return int(cuda().stacks(PARKED_STACK_BYTES))
    except OSError as error:
        print(f"stacks stay as they are: {error}", file=sys.stderr)  # noqa: T201
        return 0


def _forget_drafts(runner: Any) -> None:
    """A model that drafts has buffers of its own, and leaves what it drafted last."""
    drafter = getattr(runner, "drafter", None)
    next_ids = getattr(drafter, "backup_next_token_ids", None)
    for kept in (
        getattr(drafter, "input_ids", None), getattr(next_ids, "cpu", None), getattr(next_ids, "gpu", None),
        getattr(runner, "_draft_token_ids", None), getattr(runner, "draft_token_ids_cpu", None),
    ):  # fmt: skip
        if isinstance(kept, torch.Tensor):
            kept.zero_()


def revived(stack_bytes: int) -> None:
    """`stack_bytes`: what `scrub` returned. Raises OSError: nothing may run on stacks that are too small."""
    torch.cpu._init_amx()  # the kernel's permission, per process, and not part of an image
    if stack_bytes:
        cuda().stacks(stack_bytes)


def cuda() -> Any:
    from pool import cuda  # noqa: PLC0415 - only where there is a GPU

    return cuda
