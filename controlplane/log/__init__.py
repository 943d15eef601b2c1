"""The log: the only truth. One protocol, two twins (`memory`, `postgres`) that pass the same contract suite."""

from controlplane.log.contract import (
    CellHeld,
    Conflict,
    Full,
    HeadMoved,
    Log,
    Oversized,
    Repeated,
    Snapshot,
    StaleEpoch,
    Unstorable,
)
from controlplane.log.memory import MemoryLog

__all__ = [
    "CellHeld",
    "Conflict",
    "Full",
    "HeadMoved",
    "Log",
    "MemoryLog",
    "Oversized",
    "Repeated",
    "Snapshot",
    "StaleEpoch",
    "Unstorable",
]
