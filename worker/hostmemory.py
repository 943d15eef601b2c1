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


def taken_by(leader: int, proc: Path = PROC) -> int:
    """Bytes of memory that a process and all below it take: each page that several processes share counts in parts.

    About 10 ms a gigabyte, so not for an event loop. 0: they are gone.
    """
    return sum(_proportional(proc, pid) for pid in _tree(leader, proc))


def _proportional(proc: Path, pid: int) -> int:
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text(encoding="ascii")
    except (OSError, ValueError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def _tree(leader: int, proc: Path) -> list[int]:
    """By what each thread says of its children: a look at every process of the machine costs more."""
    found, left = list[int](), [leader]
    while left:
        found.append(pid := left.pop())
        for children in (proc / str(pid) / "task").glob("*/children"):
            try:
                left += map(int, children.read_text(encoding="ascii").split())
            except (OSError, ValueError):
                continue  # it ends just now
    return found
