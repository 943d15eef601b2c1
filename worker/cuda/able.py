"""Whether CUDA state can be taken off a GPU on this machine, and why not."""

import functools
import importlib.util
from typing import Final

from worker import gpus

DRIVER: Final = 570
"""The first with the checkpoint API."""


@functools.cache
def hindrance() -> str:
    """In words, with what to do; empty: it can."""
    if not gpus.gpus():
        return "it has no GPU"
    version = gpus.driver_version()
    if int(version.partition(".")[0] or 0) < DRIVER:
        return f"its driver is {version}; checkpoints need {DRIVER} or newer: update it"
    if importlib.util.find_spec("cuda") is None:
        return "cuda-bindings is not installed: install enginehouse[gpu]"
    return ""
