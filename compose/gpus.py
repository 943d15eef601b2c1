"""The GPUs that this machine offers to the plane, and what is missing to use them."""

import os
from importlib.util import find_spec
from typing import Final

import msgspec

from compose.refusal import EnvironmentRefusal
from controlplane.plane import PlaneDevice
from pool.nvml import joined
from worker import gpus
from worker.gpus import Gpu
from worker.islands import islands

NEEDED: Final = ("vllm", "torch", "cuda.bindings")
RESERVE: Final = (2 << 30, 16)
"""Of each GPU is left for the pool daemon's context and the driver, which took 1.2 GB of an H200: so many bytes, or one in
so many of a small one."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    gpus: tuple[Gpu, ...] = ()
    """Those that the plane may use."""
    missing: str = ""
    """The first package that is missing to use them."""

    @property
    def devices(self) -> tuple[PlaneDevice, ...]:
        """As the plane offers them: none while something is missing."""
        if self.missing:
            return ()
        near = islands([gpu.uuid for gpu in self.gpus], joined)
        return tuple(
            PlaneDevice(
                device=gpu.uuid, name=f"gpu{gpu.index}", kind="gpu", size_bytes=_offered(gpu.size_bytes),
                island=near.get(gpu.uuid, ""),
            )
            for gpu in self.gpus
        )  # fmt: skip


def look(allowed: tuple[str, ...] | None) -> Found:
    """Those of `allowed` (None: all that CUDA_VISIBLE_DEVICES shows). Raises EnvironmentRefusal for one that is not here."""
    here = gpus.gpus()
    if allowed is None:  # many share a machine by this variable; here alone it counts: engines are told theirs by the plane
        chosen = gpus.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    else:
        if absent := [uuid for uuid in allowed if uuid not in {gpu.uuid for gpu in here}]:
            known = ", ".join(gpu.uuid for gpu in here) or "none"
            raise EnvironmentRefusal(
                "no_gpu", f"This machine has no GPU {absent[0]}; it has {known}.",
                "Correct gpus in the settings' [node] table; nvidia-smi -L lists them.",
            )  # fmt: skip
        chosen = tuple(gpu for gpu in here if gpu.uuid in allowed)
    return Found(gpus=chosen, missing=_missing() if chosen else "")


def _missing() -> str:
    for name in NEEDED:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:  # of `cuda` itself
            found = None
        if found is None:
            return name
    return ""


def _offered(size_bytes: int) -> int:
    most, part = RESERVE
    return size_bytes - min(most, size_bytes // part)
