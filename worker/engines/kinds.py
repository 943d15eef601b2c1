"""The kinds of engines, by the name that a model's spec has for them."""

import os
from pathlib import Path
from typing import Any

from controlplane import lean
from worker.engines.interface import Engine


def make(
    engine: str, source: Path, arguments: dict[str, Any], *, device: str = "", ranks: int = 1, bare: bool = False,
    artefacts: Path | None = None,
) -> Engine:  # fmt: skip
    """Return the engine, started. Imports are here: the fake engine must not cost a torch."""
    match engine:
        case "fake":
            from worker.engines.fake import FakeEngine  # noqa: PLC0415

            return FakeEngine(source, arguments, ranks=ranks)
        case "transformers":
            # Threads that spin at barriers are ruin where they have to share processors: 10 tokens/s instead of 50.
            # Read once, when torch loads its OpenMP.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            with lean.uncollected():
                from worker.engines.transformers import TransformersEngine  # noqa: PLC0415

            return TransformersEngine(source, arguments)
        case "vllm" if not device:
            from worker.engines.vllm_cpu import CpuVllmEngine  # noqa: PLC0415

            return CpuVllmEngine(source, arguments, artefacts=artefacts)
        case "vllm":
            from worker.engines.vllm import VllmEngine  # noqa: PLC0415

            return VllmEngine(source, arguments, device=device, bare=bare, artefacts=artefacts)
        case _:
            raise SystemExit(f"unknown engine {engine!r}")
