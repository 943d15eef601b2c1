"""Rows of figures: medians with their ranges, and what machine they are of."""

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pynvml

Row = dict[str, Any]


def medians(rows: Sequence[Row]) -> Row:
    """Of numbers [median, least, most], of truths whether all hold. Names are those of the first row."""
    found: Row = {}
    for name in rows[0] if rows else ():
        values = [row[name] for row in rows if row.get(name) is not None]
        if values and all(isinstance(value, bool) for value in values):
            found[name] = all(values)
        elif values and all(isinstance(value, int | float) for value in values):
            found[name] = [round(value, 3) for value in (statistics.median(values), min(values), max(values))]
    return found


def machine() -> Row:
    """Date, processors, driver and versions."""
    found: Row = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "kernel": platform.release(), "cores": os.cpu_count(),
        "python": platform.python_version(),
    }  # fmt: skip
    for name in ("vllm", "torch", "transformers", "triton", "cuda-bindings"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    try:
        pynvml.nvmlInit()
        found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        found["driver"] = None
    return found
