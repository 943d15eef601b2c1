"""`enginehouse bench swap` on a machine without a GPU: the Transformers engine, a pool of its own, whole cycles."""

import json
import subprocess
import sys
from pathlib import Path

from tests.tinymodels import tiny


def test_cycles_of_a_directory_are_measured_and_written(tmp_path: Path) -> None:
    source, file, work = tiny(tmp_path / "model"), tmp_path / "rows.json", tmp_path / "w"
    argv = [sys.executable, "-m", "compose", "bench", "swap", "--shape", str(source), "--cycles", "2"]
    run = subprocess.run(
        [*argv, "--json", str(file), "--work", str(work)], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "cycle, all together" in run.stdout and "the same everywhere: yes" in run.stdout
    rows = json.loads(file.read_text())
    assert rows["date"] and rows["gpus"] == 0
    cycles = rows["parts"]["cycles a"]
    assert len(cycles["rows"]) == 3 and all(row["same_tokens"] for row in cycles["rows"])
    assert rows["parts"]["stage a"]["same_set_again"] is True
    assert "cycles a: engine, grown by" in run.stdout and "cycles a: daemon, grown by" in run.stdout


def test_cycles_leave_no_descriptor_thread_or_mapping_behind(tmp_path: Path) -> None:
    """200 on a real device: `growth-h200-*.json` in `tests/bench/results`."""
    source, file = tiny(tmp_path / "model"), tmp_path / "rows.json"
    argv = [sys.executable, "-m", "compose", "bench", "swap", "--shape", str(source), "--cycles", "60", "--json", str(file)]
    subprocess.run([*argv, "--work", str(tmp_path / "w")], capture_output=True, timeout=100, check=True)
    later = json.loads(file.read_text())["parts"]["cycles a"]["rows"][10:]
    for key in (f"{who}_{what}" for who in ("engine", "daemon") for what in ("fds", "threads", "maps")):
        counts = [row[key] for row in later]
        assert min(counts) > 0
        assert counts[-1] <= counts[0] + 2, f"{key}: {counts}"  # a segment is made ready ahead, once; a leak is fifty
