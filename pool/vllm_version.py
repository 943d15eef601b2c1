"""What the supported versions of vLLM (0.26 up to 0.33) do differently, in one place.

0.26 has no argument for the backend, calls its getter by another name, keeps one memory pool a tag, and wants its block tables
told when KV memory is there again. Later ones keep block tables in memory that no sleep of ours touches (tag `runtime`), have
hooks around a checkpoint of the process (since 0.27.1), and let go of their graphs themselves.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

OLDEST: Final = (0, 26)
BELOW: Final = (0, 34)


def supported(version: str) -> bool:
    """Whether a version's first two numbers are within what was read and tried."""
    major, minor, *_ = (*version.split("."), "0", "0")
    return major.isdecimal() and minor.isdecimal() and OLDEST <= (int(major), int(minor)) < BELOW


def takes_backend(engine_arguments: type) -> bool:
    """Whether the backend is chosen by an engine argument; else by the attribute of the model's configuration."""
    return "sleep_mode_backend" in getattr(engine_arguments, "__dataclass_fields__", {})


def sleep_backend(worker: Any) -> Any:
    """The backend of vLLM's worker, made if need be."""
    if hasattr(type(worker), "sleep_mode_backend"):
        return worker.sleep_mode_backend
    return worker._get_sleep_mode_backend()


def memory_pools(allocator: Any, tag: str) -> Iterable[Any]:
    """Torch's memory pools with a tag of vLLM's allocator: one before 0.28, several since."""
    entry = allocator.allocator_and_pools[tag]
    return [pool for pool, _ in entry] if isinstance(entry, list) else [entry[0]]


def when_kv_is_back(worker: Any) -> Callable[[], None]:
    """What vLLM wants done once its KV memory is there again."""
    told: Callable[[], None] | None = getattr(worker.model_runner, "post_kv_cache_wake_up", None)
    return told or (lambda: None)


def models(worker: Any) -> tuple[Any, Any | None]:
    """The model, and the one that drafts for it if there is one with weights."""
    return worker.model_runner.get_model(), worker.get_draft_model()


def make_loadable(worker: Any) -> None:
    """A worker that started with made-up weights reads files from here on."""
    worker.vllm_config.load_config.load_format = "auto"


def load_draft(worker: Any) -> None:
    """Read the drafting model's weights again, to where they were: a reload of vLLM's own is of the model alone."""
    draft = worker.get_draft_model()
    if draft is None:
        return
    from vllm.model_executor.model_loader import get_model_loader  # noqa: PLC0415 - only where vLLM is

    loader = get_model_loader(worker.vllm_config.load_config)
    draft.load_weights(loader.get_all_weights(worker.vllm_config.speculative_config.draft_model_config, draft))


def release_graphs(runner: Any) -> None:
    """Let go of all CUDA graphs that either of vLLM's runners has captured, and of those of compiled pieces."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper  # noqa: PLC0415 - only where vLLM is
    from vllm.compilation.cuda_graph import CUDAGraphWrapper  # noqa: PLC0415

    manager: Any = getattr(runner, "cudagraph_manager", None)
    if hasattr(manager, "release_graphs"):
        manager.release_graphs()
    elif manager is not None:
        manager.graphs.clear()
        manager._graphs_captured = False
    CUDAGraphWrapper.clear_all_graphs()
    BreakableCUDAGraphWrapper.clear_all_graphs()


def checkpoint_prepare(worker: Any) -> None:
    """vLLM's own hook before a checkpoint of the process, where it has one: of what FlashInfer shares, not of NCCL."""
    getattr(worker, "checkpoint_prepare", lambda: None)()


def checkpoint_restore(worker: Any) -> None:
    """Its counterpart behind the restore."""
    getattr(worker, "checkpoint_restore", lambda: None)()
