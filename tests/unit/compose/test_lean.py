"""What our processes leave out at their start, and that they collect garbage afterwards."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.lean import PROGRAMS, SPARED, without

ROOT = Path(__file__).parents[3]
SEEN = """
import sys
import controlplane.bus, structlog, nats
seen = {"rich", "aiohttp"} & set(sys.modules)
assert not seen, seen
import rich.console, aiohttp  # whoever wants them has them
assert aiohttp.ClientSession and rich.console.Console
structlog.get_logger().info("a word")
"""


def test_a_spared_module_is_not_imported_by_the_way_and_is_there_for_who_wants_it() -> None:
    done = subprocess.run([sys.executable, "-c", SEEN], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert set(SPARED) == {"structlog", "nats"}


def test_what_is_there_already_stays() -> None:
    with without("json", "no_such_module"):
        assert sys.modules["json"] is not None
        with pytest.raises(ImportError):
            importlib.import_module("no_such_module")
    assert "no_such_module" not in sys.modules


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_every_program_that_starts_without_collecting_garbage_collects_it_then(program: str) -> None:
    body = inspect.getsource(importlib.import_module(program).main)
    assert body.splitlines()[1].strip() == "lean.started()"


def test_no_other_program_stops_collecting() -> None:
    code = "import gc, controlplane; assert gc.isenabled()"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0
