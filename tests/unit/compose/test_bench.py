"""`bench`: what it asks for before it begins, and what it makes of its rows."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from compose.bench import checkpoints, ladderreport, swapreport
from compose.bench.holdings import grown, held
from compose.bench.rows import medians
from compose.bench.shapes import SHAPES
from compose.bench.workplace import plane_place, workplace
from compose.cli import main
from compose.refusal import EnvironmentRefusal


def ran(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return int(ended.value.code or 0)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.gpus.gpus", tuple)


def test_without_a_gpu_it_says_so_and_names_what_can_be_measured(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("bench", "swap", "--shape", "1.5b") == 2
    said = capsys.readouterr().err
    assert "'1.5b' needs a GPU, and the driver shows 0" in said and "--shape smollm2" in said
    assert ran("bench", "swap", "--json", "x.json") == 2
    assert json.loads(capsys.readouterr().err)["code"] == "no_gpu"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--against", "vllm-l3"), ("--parts", "all"), ("--arguments", "[]"), ("--cycles", "0")],
)
def test_what_it_does_not_know_is_named(option: str, value: str, no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("bench", "swap", option, value) == 2
    said = capsys.readouterr().err
    assert option in said


def test_a_shape_that_is_none_is_named_before_a_gpu_is_missed(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("bench", "swap", "--shape", "nope") == 2
    said = capsys.readouterr().err
    assert "'nope' is neither a directory" in said and "smollm2" in said


def test_the_list_of_benches_is_there_without_their_imports(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("bench", "--help") == 0
    assert "swap" in capsys.readouterr().out


def test_medians_are_of_numbers_and_truths_of_all() -> None:
    rows: list[dict[str, Any]] = [
        {"ms": 3.0, "same_tokens": True, "word": "x", "none": None},
        {"ms": 1.0, "same_tokens": False},
    ]
    assert medians(rows) == {"ms": [2.0, 1.0, 3.0], "same_tokens": False}
    assert medians([]) == {}


def test_growth_is_counted_from_a_quarter_of_the_cycles_on() -> None:
    rows = [{"engine_fds": value} for value in (5, 9, 11, 11, 11, 11, 11, 13)]
    assert grown(rows, "engine_fds") == 2
    assert grown(rows[:1], "engine_fds") == 0


def test_what_a_process_and_its_children_hold_is_counted_together() -> None:
    child = "import sys; held = [open('/dev/null') for _ in range(40)]; print(flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdin is not None and run.stdout is not None
        run.stdout.readline()
        found = held("it", run.pid)
        run.stdin.close()
    assert found["it_fds"] >= 46 and found["it_threads"] == 2
    assert found["it_maps"] > 20 and found["it_private_bytes"] > 1 << 20


def test_one_comparison_that_fails_anywhere_shows() -> None:
    rows = {"parts": {"cycles a": {"rows": [{"same_tokens": True}]}, "newcomer": {"same_tokens": True}}}
    assert swapreport.same_tokens(rows)
    rows["parts"]["cycles a"]["rows"].append({"same_tokens": False})  # type: ignore[attr-defined]
    assert not swapreport.same_tokens(rows)


def test_goals_follow_from_the_bytes_and_the_bus_of_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    ms = {step: [10.0, 9.0, 11.0] for step in swapreport.STEPS}
    rows = {
        "shape": "8b", "device": "H", "gpus": 1, "date": "today", "vllm": "1", "torch": None, "driver": "2",
        "parts": {
            "bus": {"bytes_per_s": [50e9, 49e9, 51e9]},
            "cycles a": {"median": {**ms, "cycle_ms": [390.0, 380, 400], "up_ms": [355.0, 1, 2], "copy_ms": [310.0, 1, 1],
                                    "bytes_copied": [15e9, 1]}},
            "throughput": {"many": [980.0, 990.0, 970.0], "one": [10.0], "plain_many": [1000.0], "plain_one": []},
            "plain vLLM": {"start_s": 30.0}, "plain vLLM, level 1": {"median": {"cycle_ms": [780.0, 1, 1]}},
        },
    }  # fmt: skip
    swapreport.show(rows)
    said = capsys.readouterr().out
    assert re.search(r"command to the first token +355 ms +goal 444 ms, 15.00 GB", said)
    assert re.search(r"down right before it +390 ms +the same goal", said)
    assert "96.8% of the bus" in said
    assert "2.0 x ours" in said
    assert "98.0% of plain vLLM's 1000" in said


@pytest.mark.parametrize(("ranks", "goal"), [(1, 282), (2, 415)])
def test_the_floor_of_several_links_is_what_they_reach_together(
    ranks: int, goal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    ms = {step: [10.0, 9.0, 11.0] for step in swapreport.STEPS} | {
        "bytes_copied": [15e9, 1],
        "graphs": [35],
        "graphs_again": [0, 0, 0],
    }
    bus = {"bytes_per_s": [54e9, 1, 2], "links_bytes_per_s": [100e9, 1, 2]}
    rows = {
        "shape": "8b", "device": "H", "gpus": 2, "ranks": ranks, "date": "today", "vllm": "1", "torch": None, "driver": "2",
        "parts": {"bus": bus, "cycles a": {"median": {**ms, "cycle_ms": [270.0, 1, 2], "copy_ms": [160.0, 1, 1]}}},
    }  # fmt: skip
    swapreport.show(rows)
    said = capsys.readouterr().out
    assert f"goal {goal} ms, 15.00 GB" in said
    assert "93.8% of the bus, 2 links" in said
    assert "of 35, over all cycles" in said


@pytest.mark.parametrize("name", SHAPES)
def test_a_shapes_checkpoint_has_about_the_bytes_that_it_says(name: str) -> None:
    shape = SHAPES[name]
    sizes = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    written = 0
    for _, dtype, extents in checkpoints.tensors(shape):
        size = sizes[dtype]
        for extent in extents:
            size *= extent
        written += size
    assert abs(written - shape.bytes) < shape.bytes / 100


def test_a_checkpoint_is_made_once_and_differs_by_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = msgspec.structs.replace(SHAPES["tiny-fp8"], layers=1, hidden_size=64, inner_size=64, vocab_size=64)
    monkeypatch.setitem(SHAPES, "small", small)
    one, other, same = (checkpoints.make(tmp_path / str(nth), "small", seed) for nth, seed in enumerate((1, 2, 1)))
    bytes_of = [b"".join(file.read_bytes() for file in sorted(path.glob("*.safetensors"))) for path in (one, other, same)]
    assert bytes_of[0] == bytes_of[2] != bytes_of[1]
    config = json.loads((one / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    file = json.loads((one / "model.safetensors.index.json").read_text())["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    assert str(load_file(one / file)["model.layers.0.mlp.up_proj.weight"].dtype) == "torch.float8_e4m3fn"


def test_a_ladders_goals_follow_from_the_steps_of_the_same_run() -> None:
    def took(milliseconds: float) -> dict[str, float]:
        return {"median_ms": milliseconds, "least_ms": milliseconds, "most_ms": milliseconds, "n": 3}

    rows = {
        "engine": "vllm", "image": {}, "host_bytes": 7,
        "ways": {"saved -> first answer": took(2500), "checkpoint -> first answer": took(900)},
        "steps_ms": {
            "saved -> first answer": {"restore": took(1700), "cuda_restore": took(450)},
            "checkpoint -> first answer": {"cuda_restore": took(500), "fill": took(300)},
        },
    }  # fmt: skip
    found = {name: (goal, measured) for name, goal, measured in ladderreport.figures(rows)}
    assert found["likewise, over its restores"] == ("<= CRIU 1700 + CUDA 450 + 600 ms", "+ 350 ms")
    assert found["checkpoint -> first answer"] == ("<= CUDA 500 + 1.08 x copy 300 + 300 = 1124 ms", "900 ms")
    assert found["memory of the host at checkpoint"][1] == "7 bytes"
    bare = ladderreport.figures({**rows, "steps_ms": {}, "host_bytes": 0})
    assert [name for name, _, _ in bare] == ["saved -> first answer", "checkpoint -> first answer"]


def test_a_bench_works_in_a_directory_of_its_own_that_goes_or_in_the_one_it_was_given(tmp_path: Path) -> None:
    with workplace(None) as place:
        (place / "made").touch()
    assert not place.exists()
    with workplace(tmp_path / ("k" * 120), longest=None) as place:
        place.mkdir()
    assert place.exists()


def test_a_directory_that_leaves_no_room_for_sockets_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    with pytest.raises(EnvironmentRefusal, match="sockets below it leave room for 73") as refused, workplace(long):
        pass
    assert refused.value.code == "path_too_long"
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(EnvironmentRefusal, match="TMPDIR"):
        plane_place()
    with pytest.raises(EnvironmentRefusal), workplace(None):
        pass
    assert list(long.iterdir()) == []
