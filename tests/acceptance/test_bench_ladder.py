"""`enginehouse bench ladder`: a plane of its own, every way up and down that this machine has, answers compared."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from compose.embedded.cluster import orphans
from pool.place import SHARED_MEMORY
from worker.images import criu


@pytest.mark.timeout(300)
def test_every_way_up_and_down_is_measured_and_written(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    argv = [sys.executable, "-m", "compose", "bench", "ladder", "--shape", "fake", "--cycles", "3", "--json", str(file)]
    with tempfile.TemporaryDirectory(prefix="eh", dir="/tmp") as work:
        environment = os.environ | {"TMPDIR": work}
        run = subprocess.run(argv, capture_output=True, text=True, timeout=270, check=False, env=environment)
        assert list(Path(work).iterdir()) == [], "its plane's directory"
    assert run.returncode == 0, run.stderr
    assert not [one for one in orphans() if _of(work, one / "owner.json")], "nor its Postgres cluster, which root has elsewhere"
    assert not [one for one in SHARED_MEMORY.glob("enginehouse-*") if _of(work, one / "owner")], "nor the pool's segments"
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


def _of(work: str, owner: Path) -> bool:
    """Whether it says that it is for a directory below `work`."""
    try:
        return work in owner.read_text()
    except OSError:
        return False


def test_an_unknown_shape_is_refused_with_those_that_there_are() -> None:
    argv = [sys.executable, "-m", "compose", "bench", "ladder", "--shape", "enormous"]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "'enormous' is neither a directory" in run.stderr and "8b" in run.stderr
