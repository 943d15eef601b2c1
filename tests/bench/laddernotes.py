"""What is seen of an engine's process from outside, and what is noted of it."""

import os
import time
from pathlib import Path
from typing import Any


def ms(begun: float) -> float:
    return round((time.monotonic() - begun) * 1000, 1)


def spoken(said: Any) -> dict[str, float]:
    return {f"{one.verb}_ms": one.took_ms for one in said}


def nvidia_files(pid: int) -> dict[str, int]:
    return {name: count for name, count in open_files(pid).items() if "nvidia" in name}


def open_files(pid: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            name = "".join(letter for letter in os.readlink(entry) if not letter.isdigit())
        except OSError:
            continue
        found[name] = found.get(name, 0) + 1
    return found


def left_over(work: Path) -> list[str]:
    """Command lines of processes that were started from this directory's engines or holders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if str(work) in line and ("worker.holder" in line or "worker.engines" in line):
                found.append(line[:200])
    return found
