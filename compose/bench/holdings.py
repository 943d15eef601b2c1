"""What processes hold of the machine besides a device: what grows over many swaps is a leak."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from compose.bench.rows import Row

WHAT: Final = {"fds": "descriptors", "threads": "threads", "maps": "mappings", "private_bytes": "bytes of its own"}
"""Key of a row -> its name. Bytes of its own: pages that no other process shares (`Private_*` of the kernel's smaps_rollup)."""


def held(who: str, pid: int) -> Row:
    """Of a process and all that it has started, together; `who` goes before each name. One that ended meanwhile has nothing."""
    total = dict.fromkeys(WHAT, 0)
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            total["fds"] += one.num_fds()
            total["threads"] += one.num_threads()
            total["maps"] += len(Path(f"/proc/{one.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines())
            total["private_bytes"] += int(one.memory_full_info().uss)
    return {f"{who}_{name}": value for name, value in total.items()}


def grown(rows: Sequence[Row], key: str) -> int:
    """What there is more of after the last row than when a quarter of them were over: by then a process has what it keeps."""
    return int(rows[-1][key] - rows[len(rows) // 4][key])
