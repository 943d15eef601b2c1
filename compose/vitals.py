"""What the kernel says of a process that does not answer: whether it runs, waits, or is stopped, and what it has used."""

import os
from pathlib import Path
from typing import Final

from compose.vigil import Condition, Vitals

_STATES: Final[dict[str, Condition]] = {
    "R": "runs", "D": "disk", "T": "stopped", "t": "traced",
}  # fmt: skip
_PARENT, _USER, _SYSTEM, _CHILDREN_USER, _CHILDREN_SYSTEM = 1, 11, 12, 13, 14
"""Places after the name in /proc/PID/stat."""


def vitals(pid: int) -> Vitals | None:
    """Of the process with its threads (one may have the interpreter and wait for a disk), and of its children where they do its
    work (Postgres' sessions); None: it is gone."""
    if (own := _fields(f"/proc/{pid}")) is None:
        return None
    state: Condition = _STATES.get(own[0], "waits")
    others = (_fields(f"/proc/{other}") for other in _numbers("/proc"))
    family = [own, *(fields for fields in others if fields is not None and fields[_PARENT] == str(pid))]
    if state == "waits":
        threads = (_fields(f"/proc/{pid}/task/{thread}") for thread in _numbers(f"/proc/{pid}/task"))
        busy = {_STATES.get(fields[0], "waits") for fields in (*family, *threads) if fields is not None}
        state = "runs" if "runs" in busy else "disk" if "disk" in busy else "waits"
    ticks = sum(int(fields[_USER]) + int(fields[_SYSTEM]) for fields in family)
    ticks += int(own[_CHILDREN_USER]) + int(own[_CHILDREN_SYSTEM])  # else the end of a child would take away what it had used
    return Vitals(state, ticks / os.sysconf("SC_CLK_TCK"))


def _fields(place: str) -> list[str] | None:
    """Of `stat` in /proc/PID or that of a thread, from the state on; None: there is none such, or a zombie."""
    try:
        text = Path(place, "stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else fields


def _numbers(place: str) -> list[str]:
    try:
        return [name for name in os.listdir(place) if name.isdigit()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return []
