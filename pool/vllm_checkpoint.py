"""What a rank of a tensor parallel vLLM shares with the others goes before a checkpoint of CUDA, and is made anew behind it.

NCCL's communicators map memory of the other ranks, and the driver restores no process that does. CUDA graphs hold NCCL's
kernels, so they go first (NCCL's end waits for them), and are captured again once weights and KV memory are mapped: a capture
runs the model before it records it.
"""

import gc
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch

from pool import vllm_graphs, vllm_version

NCCL: Final = "pynccl_comm"
"""vLLM's name of its communicator over NCCL, of each group."""
_WORKSPACES: Final = ("_fi_ar_workspace", "_fi_ar_quant_workspace")
"""Of FlashInfer: vLLM's names of what its fused passes share between ranks."""


def hindrance() -> str | None:
    """What this rank shares with the others besides vLLM's communicators over NCCL, and does not give up; None: nothing."""
    from vllm.distributed.device_communicators import flashinfer_all_reduce  # noqa: PLC0415 - only where vLLM is

    if any(getattr(flashinfer_all_reduce, name, None) is not None for name in _WORKSPACES):
        return "FlashInfer has a workspace that ranks share"
    for group in _groups():
        ways = vars(group.device_communicator) if group.device_communicator is not None else {}
        for name, other in ways.items():  # each of vLLM's ways to reduce (0.26 has six, 0.33 seven) is named so
            shares = (name.endswith("_comm") and name != NCCL) or name == "all2all_manager"
            if shares and other is not None and not getattr(other, "disabled", False):
                return f"{group.unique_name} has a {type(other).__name__}, which shares memory between ranks"
        if group.world_size > 1 and _initialized(group.device_group):
            return f"torch has a communicator of its own for {group.unique_name}"
    return None


def release_graphs(runner: Any) -> tuple[int, int]:
    """Of vLLM's model runner; asleep. Returns how many CUDA graphs there were, and how many somebody else holds still."""
    torch.cuda.synchronize()
    before = vllm_graphs.there()
    vllm_version.release_graphs(runner)
    gc.unfreeze()  # vLLM has frozen what was there at the end of its start, graphs among it
    gc.collect()
    gc.freeze()
    torch.cuda.empty_cache()
    return before, vllm_graphs.there()


def prepare(worker: Any, stack_bytes: int) -> int:
    """Give up communicators; all ranks at once, without graphs.

    stack_bytes: of the GPU's stacks, a thread, while it is off its GPU. Returns what `restore` wants to know of them (0: they
    stay as they are, and cost their memory). Raises whatever NCCL or vLLM does: the rank is lost.
    """
    torch.cuda.synchronize()
    vllm_version.checkpoint_prepare(worker)
    for communicator in _communicators():
        if communicator.comm is not None:
            handle, communicator.comm = communicator.comm, None
            communicator.nccl.ncclCommDestroy(handle)
    torch.cuda.synchronize()
    try:
        return int(_cuda().stacks(stack_bytes))
    except OSError as error:
        print(f"stacks stay as they are: {error}", file=sys.stderr)  # noqa: T201
        return 0


def restore(worker: Any, stack_bytes: int) -> None:
    """Communicators anew, under the objects that vLLM knows; all ranks at once. Raises whatever NCCL does: the rank is lost."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: PLC0415 - only where vLLM is

    if stack_bytes:
        _cuda().stacks(stack_bytes)
    for communicator in _communicators():
        if communicator.comm is None:
            made = PyNcclCommunicator(group=communicator.group, device=communicator.device)
            communicator.__dict__.update(made.__dict__)
    vllm_version.checkpoint_restore(worker)


def capture_graphs(runner: Any) -> None:
    """As at the start, with weights and KV memory mapped. Raises whatever it meets: this rank and the others differ then."""
    runner.capture_model()
    torch.cuda.synchronize()


def _communicators() -> Iterator[Any]:
    """vLLM's own over NCCL, in the same order in every rank; what they were made of is kept by each."""
    for group in _groups():
        communicator = getattr(group.device_communicator, NCCL, None)
        if communicator is not None and communicator.available and not communicator.disabled:
            yield communicator


def _initialized(device_group: Any) -> bool:
    """Whether torch's own NCCL has a communicator for the group: it makes one for the first tensor that it is to send."""
    try:
        backend = device_group._get_backend(torch.device("cuda"))
    except RuntimeError:  # there is none for GPUs
        return False
    return bool(getattr(backend, "_is_initialized", lambda: False)())


def _groups() -> list[Any]:
    from vllm.distributed import parallel_state  # noqa: PLC0415 - only where vLLM is

    return [group for known in parallel_state._groups.values() if (group := known()) is not None]


def _cuda() -> Any:
    from pool import cuda  # noqa: PLC0415 - only where there is a GPU

    return cuda
