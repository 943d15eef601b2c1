"""How long importing a module takes in a fresh process: the yardstick of every start."""

import asyncio
import os
import statistics
import sys
import time


def environment() -> dict[str, str]:
    """Ours, but processes may keep their bytecode, as an installed package's is kept."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


async def import_s(module: str, times: int = 3) -> float:
    """Median seconds from the start of a process that imports `module` to its end, the first one (bytecode) left out."""
    took = []
    for _ in range(times + 1):
        began = time.perf_counter()
        started = await asyncio.create_subprocess_exec(sys.executable, "-c", f"import {module}", env=environment())
        assert await started.wait() == 0
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])
