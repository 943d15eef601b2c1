"""What vLLM is started with: arguments of the allow-list, and nothing that a caller could slip in."""

from pathlib import Path
from typing import Any

import pytest

from controlplane import arguments
from controlplane.modelfields import spec_from_fields
from controlplane.refusal import Code, Refused
from worker.engines.fake import FakeEngine
from worker.engines.interface import EngineFault
from worker.engines.vllm import VllmEngine
from worker.engines.vllm_arguments import engine_arguments
from worker.engines.vllm_faults import users
from worker.gpus import gpus
from worker.sources import ownlayout


def test_allowed_arguments_become_vllms() -> None:
    checked = arguments.check("vllm", {"kv_bytes": "2GiB", "max_num_seqs": 256, "max_model_len": 4096, "dtype": "bfloat16"})
    found = engine_arguments(Path("/models/a"), dict(checked), bare=False)
    assert found["kv_cache_memory_bytes"] == 2 << 30
    assert (found["max_num_seqs"], found["max_model_len"], found["dtype"]) == (256, 4096, "bfloat16")
    assert found["load_format"] == "auto"


def test_what_is_not_said_is_left_to_vllm() -> None:
    assert "max_num_batched_tokens" not in engine_arguments(Path("/models/a"), {}, bare=False)


def test_a_bare_skeleton_reads_no_weights() -> None:
    assert engine_arguments(Path("/models/a"), {}, bare=True)["load_format"] == "dummy"


def test_graphs_are_captured_unless_eager() -> None:
    assert engine_arguments(Path("/models/a"), {}, bare=False)["compilation_config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert "compilation_config" not in engine_arguments(Path("/models/a"), {"enforce_eager": True}, bare=False)


def test_code_of_a_model_is_never_run_and_the_tokenizer_never_loaded() -> None:
    found = engine_arguments(Path("/models/a"), {}, bare=False)
    assert found["trust_remote_code"] is False
    assert found["skip_tokenizer_init"] is True


def test_ranks_are_compiled_without_what_shares_memory_between_them() -> None:
    compiled = {"compile": True, "gang_checkpoint": True}
    found = engine_arguments(Path("/models/a"), compiled, bare=False, ranks=2)
    assert found["compilation_config"] == {"mode": 3, "pass_config": {"fuse_allreduce_rms": False}}
    assert engine_arguments(Path("/models/a"), {"compile": True}, bare=False)["compilation_config"] == {"mode": 3}
    assert "gang_checkpoint" not in found


def test_a_model_that_drafts_is_one_of_the_same_gpu() -> None:
    drafted = {"draft_model": "/models/small", "num_speculative_tokens": 2}
    found = engine_arguments(Path("/models/a"), drafted, bare=True)
    assert found["speculative_config"] == {"method": "draft_model", "model": "/models/small", "num_speculative_tokens": 2}
    with pytest.raises(SystemExit, match="2 GPUs"):
        engine_arguments(Path("/models/a"), drafted, bare=True, ranks=2)
    with pytest.raises(SystemExit, match="'small'"):  # an engine starts in a directory of that start
        engine_arguments(Path("/models/a"), {"draft_model": "small"}, bare=True)


def test_a_draft_model_is_named_as_a_source_is() -> None:
    pinned = f"hf:org/small@{'0' * 40}"
    assert arguments.check("vllm", {"draft_model": pinned}) == {"draft_model": pinned}
    said = {"draft_model": "/models//small/", "num_speculative_tokens": 5}
    assert arguments.check("vllm", said) == {"draft_model": "/models/small", "num_speculative_tokens": 5}
    for bad in ("small", "/models/../etc", "hf:org/small", "/models/small.gguf", "/models/\x00", 7):
        with pytest.raises(Refused, match="draft_model") as refused:
            arguments.check("vllm", {"draft_model": bad})
        assert refused.value.details["param"] == "arguments.draft_model"
    for alone in ({"num_speculative_tokens": 3}, {"draft_model": "/a", "num_speculative_tokens": 17}):
        with pytest.raises(Refused, match="num_speculative_tokens"):
            arguments.check("vllm", alone)
    with pytest.raises(Refused, match="takes no argument"):
        arguments.check("transformers", {"draft_model": "/models/small"})


@pytest.mark.parametrize(
    ("said", "is_refused"),
    [
        ({"max_num_batched_tokens": 63}, True),
        ({"max_num_batched_tokens": 64}, False),
        ({"max_num_batched_tokens": 255, "max_num_seqs": 256}, True),
        ({"max_num_batched_tokens": 256, "max_num_seqs": 256}, False),
        ({"max_num_batched_tokens": 64, "draft_model": "/models/small"}, True),
        ({"max_num_batched_tokens": 256, "max_num_seqs": 256, "draft_model": "/models/small"}, True),
        ({"max_num_batched_tokens": 257, "max_num_seqs": 256, "draft_model": "/models/small"}, False),
        ({"max_num_seqs": 4096, "draft_model": "/models/small"}, False),
    ],
)
def test_a_step_has_room_for_every_sequence_and_for_what_is_drafted(said: dict[str, Any], is_refused: bool) -> None:
    if not is_refused:
        assert arguments.check("vllm", said) == said
        return
    with pytest.raises(Refused, match="max_num_batched_tokens") as refused:
        arguments.check("vllm", said)
    sequences = said.get("max_num_seqs", 64)
    numbers = {"max_num_batched_tokens": said["max_num_batched_tokens"], "max_num_seqs": sequences}
    assert refused.value.code is Code.INVALID
    assert refused.value.details == {"param": "arguments.max_num_batched_tokens", **numbers}
    assert all(str(number) in refused.value.message for number in numbers.values())


def test_all_know_the_same_number_of_sequences() -> None:
    assert engine_arguments(Path("/models/a"), {}, bare=False)["max_num_seqs"] == arguments.VLLM_SEQS == ownlayout.MAX_NUM_SEQS


def test_a_gang_can_have_no_draft_model() -> None:
    fields = {"name": "a", "source": "/models/a", "engine": "vllm", "arguments": {"draft_model": "/models/small"}}
    assert spec_from_fields(fields).arguments == {"draft_model": "/models/small"}
    with pytest.raises(Refused, match="2 devices") as refused:
        spec_from_fields(fields | {"share": {"gpus": 2}})
    assert (refused.value.code, refused.value.details["param"]) == (Code.NOT_AVAILABLE, "arguments.draft_model")


@pytest.mark.parametrize("name", ["trust_remote_code", "worker_extension_cls", "load_format", "hf_overrides"])
def test_other_arguments_of_vllm_are_refused(name: str) -> None:
    with pytest.raises(Refused, match=name):
        arguments.check("vllm", {name: "x"})


@pytest.mark.skipif(bool(gpus()), reason="this machine has a GPU")
def test_a_gpu_that_is_not_here_is_named() -> None:
    with pytest.raises(SystemExit, match="no GPU 'GPU-1'"):
        VllmEngine(Path("/models/a"), {}, device="GPU-1")


def test_engines_of_the_files_own_layout_stage_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineFault) as fault:
        FakeEngine(tmp_path, {}).stage("/run/pool.sock", "/models/a", "cfg_1")
    assert fault.value.code == "not_available"


def test_who_has_a_full_devices_memory_is_named_the_largest_first() -> None:
    assert users({10: 5 << 20, 20: 7 << 30}) == "used by pid 20 (7.0 GiB), pid 10 (5.0 MiB)"
    assert "does not say" in users({})
