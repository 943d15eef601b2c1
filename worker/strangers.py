"""Who else has memory of a GPU, and when that is worth saying: it counts once it lasts, for the plane writes it down. Pure."""

from collections.abc import Mapping
from typing import Final

LASTS: Final = 2
"""Looks in a row, a second apart, after which a process that came, grew or went counts. (Drivers list a process for a moment
after its end, and one of ours is known for it a moment after its start.)"""
SETTLES: Final = 10
"""Likewise for one that gave something back: programs take it again, and each change is an event."""
NOISE: Final = 256
"""A change of less than this part of the device is none."""


class Strangers:
    """One device's. `told` is what the plane was told last; None: nothing yet, and an earlier worker may have said anything."""

    def __init__(self, size_bytes: int) -> None:
        self._noise = size_bytes // NOISE
        self.told: Mapping[int, int] | None = None
        self._differs = 0
        self._shrunk = 0

    def look(self, seen: Mapping[int, int], *, certain: bool = False) -> bool:
        """`seen`: pid -> bytes, of all that are not ours. Returns whether the plane is to be told of it.

        `certain`: no need to wait, for somebody has just found that there is no room.
        """
        if self.told is None or self._worse(self.told, seen):
            self._differs += 1
        else:
            self._differs = 0
        shrunk = self.told is not None and sum(self.told.values()) - sum(seen.values()) > self._noise
        self._shrunk = self._shrunk + 1 if shrunk else 0
        if self._differs >= LASTS or self._shrunk >= SETTLES or (certain and (self._differs or self._shrunk)):
            self.told, self._differs, self._shrunk = dict(seen), 0, 0
            return True
        return False

    def _worse(self, told: Mapping[int, int], seen: Mapping[int, int]) -> bool:
        """One came or went, or one has grown."""
        return told.keys() != seen.keys() or any(size - told[pid] > self._noise for pid, size in seen.items())
