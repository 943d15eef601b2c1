"""How much memory this machine, or the container that this is, can still give."""

from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUP: Final = Path("/sys/fs/cgroup")
"""As a container sees its own; elsewhere it is the root's, which has no limit."""


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """By the kernel's estimate, without swapping; within the container's limit, where there is one. Raises OSError."""
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            break
    else:
        raise OSError(f"{proc / 'meminfo'} names no MemAvailable")
    try:
        limit, used = ((cgroup / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    return max(0, min(free, int(limit) - int(used) + int(stat.get("inactive_file", 0))))
