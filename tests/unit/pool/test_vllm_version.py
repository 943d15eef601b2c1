"""What differs between versions of vLLM: played, and looked up in its sources wherever those are.

`ENGINEHOUSE_VLLM_SOURCES`: directories, with colons between them, that each hold a package `vllm`; else the one installed.
"""

import ast
import os
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pool import vllm_version
from worker.engines.vllm_arguments import ENVIRONMENT


class _Old:
    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(post_kv_cache_wake_up=lambda: self.told.append(1))
        self.told: list[int] = []

    def _get_sleep_mode_backend(self) -> str:
        return "old"


class _New:
    model_runner = SimpleNamespace()
    sleep_mode_backend = "new"


def test_each_version_is_asked_as_it_wants() -> None:
    old = _Old()
    assert vllm_version.sleep_backend(old) == "old"
    assert vllm_version.sleep_backend(_New()) == "new"
    vllm_version.when_kv_is_back(old)()
    assert old.told == [1]
    vllm_version.when_kv_is_back(_New())()
    one: Any = SimpleNamespace(allocator_and_pools={"weights": ("pool", "allocator")})
    several: Any = SimpleNamespace(allocator_and_pools={"weights": [("pool", "allocator"), ("other", "allocator")]})
    assert list(vllm_version.memory_pools(one, "weights")) == ["pool"]
    assert list(vllm_version.memory_pools(several, "weights")) == ["pool", "other"]


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [
        ("0.26.0", True),
        ("0.33.1+cu130", True),
        ("0.33", True),
        ("0.34.0", False),
        ("0.25.1", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_versions_that_were_tried_are_taken_and_no_others(version: str, is_supported: bool) -> None:
    assert vllm_version.supported(version) is is_supported


SURFACE: dict[str, dict[str, tuple[str, ...]]] = {
    "device_allocator/__init__.py": {"AllocationData": ("handle", "tag", "is_asleep")},
    "device_allocator/cumem.py": {"": ("create_and_map", "unmap_and_release"), "CuMemAllocator": ("get_instance",)},
    "device_allocator/sleep_mode_backend.py": {
        "SleepModeBackend": ("suspend", "resume", "preserves_communicators"),
        "SleepModeBackendFactory": ("register_backend", "create_backend", "_registry"),
    },
    "config/model.py": {"ModelConfig": ("sleep_mode_backend", "max_model_len", "get_vocab_size")},
    "engine/arg_utils.py": {
        "EngineArgs": (
            "model", "skip_tokenizer_init", "trust_remote_code", "enable_sleep_mode", "dtype", "seed", "disable_log_stats",
            "load_format", "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "max_model_len",
            "max_num_batched_tokens", "enable_prefix_caching", "enforce_eager", "compilation_config", "speculative_config",
            "tensor_parallel_size", "worker_extension_cls", "create_engine_config",
        ),
    },
    "v1/engine/core.py": {
        "EngineCore": (
            "step", "step_with_batch_queue", "post_step", "add_request", "preprocess_add_request", "abort_requests",
            "reset_prefix_cache", "collective_rpc",
        ),
    },
    "v1/engine/__init__.py": {
        "EngineCoreRequest": ("request_id", "prompt_token_ids", "sampling_params", "arrival_time", "data_parallel_rank"),
        "EngineCoreOutput": ("request_id", "new_token_ids", "finish_reason"),
    },
    "v1/worker/gpu_worker.py": {"Worker": ("get_draft_model", "reload_weights")},
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner": ("capture_model",)},
    "v1/worker/gpu/model_runner.py": {"GPUModelRunner": ("capture_model",)},
    "compilation/cuda_graph.py": {"CUDAGraphWrapper": ("clear_all_graphs",)},
    "compilation/breakable_cudagraph.py": {"BreakableCUDAGraphWrapper": ("clear_all_graphs",)},
    "config/compilation.py": {
        "CompilationConfig": ("mode", "cudagraph_mode", "pass_config"), "PassConfig": ("fuse_allreduce_rms",),
    },
    "distributed/parallel_state.py": {"": ("_groups",)},
    "distributed/device_communicators/pynccl.py": {"PyNcclCommunicator": ("__init__",)},
    "distributed/device_communicators/pynccl_wrapper.py": {"NCCLLibrary": ("ncclCommDestroy",)},
    "distributed/device_communicators/flashinfer_all_reduce.py": {"": ("_fi_ar_workspace", "_fi_ar_quant_workspace")},
    "sampling_params.py": {
        "SamplingParams": (
            "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "stop_token_ids", "ignore_eos", "detokenize",
        ),
    },
}  # fmt: skip
"""File -> class (none: the module) -> names of vLLM that we use."""


def _sources() -> list[Path]:
    if given := os.environ.get("ENGINEHOUSE_VLLM_SOURCES"):
        return [Path(one) / "vllm" for one in given.split(":")]
    found = find_spec("vllm")
    return [Path(place) for place in (found.submodule_search_locations or ())] if found else []


def _names(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


@pytest.mark.skipif(not _sources(), reason="no vLLM is installed, and ENGINEHOUSE_VLLM_SOURCES names none")
@pytest.mark.parametrize("file", SURFACE)
def test_the_names_that_are_used_are_there(file: str) -> None:
    for source in _sources():
        tree = ast.parse((source / file).read_text())
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for kind, names in SURFACE[file].items():
            there = _names(classes[kind].body if kind else tree.body)
            assert not (missing := [name for name in names if name not in there]), f"{source}: {kind} lacks {missing}"


@pytest.mark.skipif(not _sources(), reason="no vLLM is installed, and ENGINEHOUSE_VLLM_SOURCES names none")
def test_a_worker_has_one_of_the_two_getters() -> None:
    for source in _sources():
        text = (source / "v1" / "worker" / "gpu_worker.py").read_text()
        assert "def sleep_mode_backend(self)" in text or "def _get_sleep_mode_backend(self)" in text


@pytest.mark.skipif(not _sources(), reason="no vLLM is installed, and ENGINEHOUSE_VLLM_SOURCES names none")
def test_no_way_to_reduce_by_memory_that_ranks_share_is_left_on() -> None:
    for source in _sources():
        switches = set(re.findall(r"\bVLLM_ALLREDUCE_USE_\w+", (source / "envs.py").read_text()))
        assert switches
        assert {name for name in switches if ENVIRONMENT.get(name) != "0"} == set()
