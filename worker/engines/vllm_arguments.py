"""What vLLM is told: its environment and arguments at its start, the sampling of each request. Nothing else reaches it."""

from pathlib import Path
from typing import Any, Final

from worker.engines.messages import Sampling

KV_BYTES: Final = 2 << 30
"""Unless the model's spec gives `kv_bytes`."""
DRAFTED_TOKENS: Final = 3
"""At each step, unless the spec gives `num_speculative_tokens`."""
_LEAST_SHARE: Final = 0.01
"""vLLM looks whether this part of the device is free before it starts. What it takes is said in bytes (`kv_bytes`) instead."""
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "USE_LIBUV": "0",
    "VLLM_HOST_IP": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "VLLM_LOGGING_LEVEL": "WARNING",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "0",
}  # fmt: skip
"""One process that speaks to nobody: loopback for its own gloo, no hub, no statistics. Ranks of a gang reduce by
NCCL over NVLink, without its multicast and without what FlashInfer shares between them (0.33 would by default): neither a sleep
nor a checkpoint of CUDA knows how to take those apart."""


def engine_arguments(source: Path, arguments: dict[str, Any], *, bare: bool, ranks: int = 1) -> dict[str, Any]:
    """vLLM's arguments for those of the allow-list. KV memory is cut over the ranks, as weights are."""
    graphs: dict[str, Any] = {"mode": 3} if arguments.get("compile") else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    eager = bool(arguments.get("enforce_eager"))
    chosen = {
        "model": str(source), "skip_tokenizer_init": True, "trust_remote_code": False, "enable_sleep_mode": True,
        "dtype": arguments.get("dtype", "bfloat16"), "seed": 0, "disable_log_stats": True,
        "load_format": "dummy" if bare or arguments.get("dummy_weights") else "auto", "gpu_memory_utilization": _LEAST_SHARE,
        "kv_cache_memory_bytes": arguments.get("kv_bytes", KV_BYTES) // ranks,
        "max_num_seqs": arguments.get("max_num_seqs", 64),
        "max_model_len": arguments.get("max_model_len"), "max_num_batched_tokens": arguments.get("max_num_batched_tokens"),
        "enable_prefix_caching": arguments.get("prefix_caching", True), "enforce_eager": eager,
    }  # fmt: skip
    if draft := arguments.get("draft_model"):
        if ranks > 1:
            raise SystemExit(f"a model on {ranks} GPUs with one that drafts for it is not supported: leave draft_model out")
        if not Path(draft).is_absolute():  # an engine starts in a directory of that start
            raise SystemExit(f"draft_model is {draft!r}: an absolute path is wanted")
        tokens = arguments.get("num_speculative_tokens", DRAFTED_TOKENS)
        chosen["speculative_config"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": tokens}
    if ranks > 1:
        # vLLM's own all-reduce shares buffers between processes (IPC), which a checkpoint of CUDA can't keep: NCCL's does it.
        chosen |= {
            "tensor_parallel_size": ranks, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True,
            "worker_extension_cls": "pool.vllm_rank.Rank",
        }  # fmt: skip
        graphs["pass_config"] = {"fuse_allreduce_rms": False}  # it would share memory of FlashInfer's, too
    if not eager:
        chosen["compilation_config"] = graphs
    return {name: value for name, value in chosen.items() if value is not None}


def sampling_parameters(sampling: Sampling) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415

    return SamplingParams(
        max_tokens=sampling.max_tokens, min_tokens=sampling.min_tokens, temperature=sampling.temperature,
        top_p=sampling.top_p, top_k=sampling.top_k, seed=sampling.seed, presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty, repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_ids), ignore_eos=sampling.ignore_eos,
        detokenize=False,
    )  # fmt: skip
