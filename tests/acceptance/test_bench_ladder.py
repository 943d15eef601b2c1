"""`enginehouse bench ladder`: a plane of its own, every way up and down that this machine has, answers compared."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from worker.images import criu


@pytest.mark.timeout(180)
def test_every_way_up_and_down_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    argv = [sys.executable, "-m", "compose", "bench", "ladder", "--shape", "fake", "--cycles", "3", "--json", str(file)]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stderr
    assert "answers the same everywhere: yes" in run.stdout
    rows = json.loads(file.read_text())
    assert rows["date"] and rows["kernel"] and rows["shape"] == "fake"
    ways = rows["ways"]
    assert ways["first cold start -> first answer"]["n"] == 1
    for way in ("up -> sleep", "sleep -> first answer", "up -> cold", "cold, warmest -> first answer"):
        assert ways[way]["n"] == 3 and ways[way]["median_ms"] > 0, way
    assert "start_engine" in rows["steps_ms"]["cold, warmest -> first answer"]
    assert "checkpoint" in rows["skipped"], "no GPU: said with its reason, not left out"
    found = criu.find(tmp_path)
    if found is None or criu.probe(found).refusal or "save" in rows["skipped"]:
        assert rows["skipped"]["save"]
        return
    assert ways["saved -> first answer"]["n"] == 3
    assert "restore" in rows["steps_ms"]["saved -> first answer"]
    assert rows["image"]["proof"] == "same_tokens"
    assert rows["image"]["processes_left_when_saved"] == 0
    assert "same_tokens" in rows["checks"]


def test_an_unknown_shape_is_refused_with_those_that_there_are() -> None:
    argv = [sys.executable, "-m", "compose", "bench", "ladder", "--shape", "enormous"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "'enormous' is neither a directory" in run.stderr and "8b" in run.stderr
