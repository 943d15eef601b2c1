"""How the segments of a layout lay in the engines that mapped it last: the next one's lie so, too, as a rule. Pure."""

import functools
from collections import deque

from pool.blocks import Groups, common

REMEMBERED = 8
"""Mappings of a layout. What is brought ahead has to fit all of these: where it doesn't, the engine needs memory for what it
can't map of it besides, and there may be none; a few allocations more cost a millisecond each."""


class Habits:
    def __init__(self) -> None:
        self._seen: dict[str, deque[Groups]] = {}

    def saw(self, layout: str, neighbours: Groups) -> None:
        """An engine maps it like that."""
        self._seen.setdefault(layout, deque(maxlen=REMEMBERED)).append(neighbours)

    def guess(self, layout: str) -> Groups:
        """What lay side by side in all of them; empty: none was seen."""
        seen = self._seen.get(layout, ())
        return functools.reduce(common, seen) if seen else ()
