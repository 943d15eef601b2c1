"""A machine with GPUs that has none: in every process of a plane, what talks to a driver is replaced by what plays it.

NVML, the pool's device and vLLM's engine are stand-ins (`nvml`, `cuda`, `engine`); all else is the product.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from worker import gpulocks

ROOT = Path(__file__).parents[2]
_SITE = """
import importlib.abc, importlib.util, sys
STANDINS = {"pynvml": "nvml", "pool.cuda": "cuda", "worker.engines.vllm": "engine"}

class StandIns(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in STANDINS:
            return importlib.util.spec_from_file_location(name, f"ROOT/tests/standin/{STANDINS[name]}.py")

sys.meta_path.insert(0, StandIns())
"""


def uuid(number: int) -> str:
    """Of a played GPU. Cells are locked for the whole machine, so those of two test runs, side by side, must be different."""
    return f"GPU-00000000-0000-0000-{number:04d}-{os.getpid():012d}"


def forget(devices: Iterable[str]) -> None:
    """Remove the locks of their cells. Their planes must have ended."""
    locks, _ = gpulocks.place()
    for device in devices:
        for lock in locks.glob(f"{device}.*"):
            lock.unlink()


def install(where: Path, devices: Mapping[str, int]) -> dict[str, str]:
    """Return the environment of processes that shall see `devices`: UUID -> bytes."""
    (where / "site").mkdir(parents=True)
    for uuid in devices:
        (where / uuid).mkdir()
    (where / "devices.json").write_text(json.dumps(dict(devices)))
    (where / "site" / "sitecustomize.py").write_text(_SITE.replace("ROOT", str(ROOT)))
    (where / "site" / "standin_place.py").write_text(f"PLACE = {str(where)!r}\n")
    for package in ("vllm", "cuda", "cuda/bindings"):
        (where / "site" / package).mkdir()
        (where / "site" / package / "__init__.py").write_text("")
    (where / "site" / "cuda" / "bindings" / "driver.py").write_text("from tests.standin.checkpoints import *\n")
    paths = [str(where / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": ":".join(paths)}


def place() -> Path:
    """Of the machine that this process pretends to run on."""
    import standin_place  # type: ignore[import-not-found]  # noqa: PLC0415 - only in processes of the plane

    return Path(standin_place.PLACE)
