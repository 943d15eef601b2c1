"""The ladder: where an instance stands, and where it is told to go."""

from enum import StrEnum
from typing import Final

NOT_CHECKPOINTABLE: Final = "not_checkpointable"
"""Code of what can't go to `checkpoint` as it is: its ranks share more than they give up. Nothing of it is harmed."""


class Rung(StrEnum):
    """A place on the ladder, from nothing to serving. `SAVED` needs images; `CHECKPOINT` a GPU."""

    COLD = "cold"
    SAVED = "saved"
    CHECKPOINT = "checkpoint"
    SLEEP = "sleep"
    UP = "up"

    @property
    def height(self) -> int:
        """0 for cold ... 4 for up."""
        return list(Rung).index(self)


class Activity(StrEnum):
    SETTLED = "settled"
    CLIMBING = "climbing"
    DESCENDING = "descending"


class Health(StrEnum):
    OK = "ok"
    FAILED = "failed"
    QUARANTINED = "quarantined"
