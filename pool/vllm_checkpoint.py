"""What a rank of a tensor parallel vLLM shares with the others: given up before a checkpoint of CUDA, made anew behind it.

NCCL's communicators map memory of the other ranks, and the driver restores no process that does. CUDA graphs hold NCCL's
kernels, so they go first (NCCL's end waits for them), and are captured again once weights and KV memory are mapped: a capture
runs the model before it records it.
"""

import gc
from collections.abc import Iterator
from typing import Any, Final

import torch

NCCL: Final = "pynccl_comm"
"""vLLM's name of its communicator over NCCL, of each group."""


def disband(runner: Any, stack_bytes: int) -> tuple[bool, int]:
    """Give up graphs, then communicators; all ranks at once, asleep.

    runner: vLLM's model runner. stack_bytes: of the GPU's stacks, a thread, while it is off its GPU. Returns whether there were
    graphs, and what `regroup` wants to know of the stacks (0: they stay as they are). Raises whatever NCCL does: the rank is
    lost.
    """
    torch.cuda.synchronize()
    dropped = _drop_graphs(runner)
    for communicator in _communicators():
        if communicator.comm is not None:
            handle, communicator.comm = communicator.comm, None
            communicator.nccl.ncclCommDestroy(handle)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    try:
        return dropped, int(_cuda().stacks(stack_bytes))
    except OSError:  # a checkpoint takes their memory to the host then, and that is all
        return dropped, 0


def regroup(stack_bytes: int) -> None:
    """Communicators anew, under the objects that vLLM knows; all ranks at once. Raises whatever NCCL does: the rank is lost."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator  # noqa: PLC0415 - only where vLLM is

    if stack_bytes:
        _cuda().stacks(stack_bytes)
    for communicator in _communicators():
        if communicator.comm is None:
            made = PyNcclCommunicator(group=communicator.group, device=communicator.device)
            communicator.__dict__.update(made.__dict__)


def capture(runner: Any) -> None:
    """CUDA graphs as at the start, with weights and KV memory mapped. After a failure there are none."""
    try:
        runner.capture_model()
        torch.cuda.synchronize()
    except BaseException:
        _drop_graphs(runner)
        raise


def _drop_graphs(runner: Any) -> bool:
    """Of either of vLLM's runners, and those of compiled pieces."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper  # noqa: PLC0415 - only where vLLM is

    manager = getattr(runner, "cudagraph_manager", None)
    whole = manager.graphs if manager is not None else {}
    pieces = [wrapper for wrapper in CUDAGraphWrapper._all_instances if wrapper.concrete_cudagraph_entries]
    found = bool(whole or pieces)
    if manager is not None:
        whole.clear()
        manager._graphs_captured = False
    CUDAGraphWrapper.clear_all_graphs()
    return found


def _communicators() -> Iterator[Any]:
    """vLLM's own over NCCL, in the same order in every rank; what they were made of is kept by each."""
    for group in _groups():
        communicator = getattr(group.device_communicator, NCCL, None)
        if communicator is not None and communicator.available and not communicator.disabled:
            yield communicator


def bond() -> str | None:
    """What holds this rank to the others besides vLLM's communicators over NCCL, and is not given up here; None: nothing."""
    for group in _groups():
        ways = vars(group.device_communicator) if group.device_communicator is not None else {}
        for name, other in ways.items():  # each of vLLM's ways to reduce (0.26 has six, 0.33 seven) is named so
            if name.endswith("_comm") and name != NCCL and other is not None and not getattr(other, "disabled", False):
                return f"{group.unique_name} reduces by {type(other).__name__}, which shares memory between ranks"
        if group.world_size > 1 and _initialized(group.device_group):
            return f"torch has a communicator of its own for {group.unique_name}"
    return None


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
