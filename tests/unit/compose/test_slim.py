"""The control plane, its faces and a worker with fake engines do without PyTorch: it comes with the extra `cpu` alone."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate", "huggingface_hub"}
ROOT = Path(__file__).parents[3]
PROCESSES = (
    "compose.cli.running", "compose.up", "compose.attendance", "controlplane.decider", "web.server", "pool.daemon",
    "worker.agent", "worker.holder", "worker.frontend.server", "worker.engines.process", "worker.engines.fake",
)  # fmt: skip
BLOCKED = """
import importlib, sys
for name in {heavy!r}:
    sys.modules[name] = None  # importing it is an ImportError
for name in {processes!r}:
    importlib.import_module(name)
"""


def test_the_plain_install_asks_for_no_machine_learning() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for line in project["dependencies"]}
    assert asked.isdisjoint(HEAVY)
    extra = {re.split(r"[^\w-]", line)[0].replace("-", "_").lower() for line in project["optional-dependencies"]["cpu"]}
    assert {"torch", "transformers"} <= extra


def test_every_process_but_a_real_engine_starts_without_it() -> None:
    code = BLOCKED.format(heavy=sorted(HEAVY), processes=PROCESSES)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
