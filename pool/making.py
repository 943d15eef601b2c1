"""Memory for a set's blocks is made while earlier ones travel; how many to make before the first leaves is decided here.

Making one costs 0.2 ms, and several times as much while its device copies. So over one link the copy hides it, and over two, or
for many small blocks, the links would stand still between them: then some are made ahead. Pure, but for what it learns.
"""

import math
from collections.abc import Sequence

BESIDE_S = 1.1e-3
"""For one, beside a copy, until this device has been seen (measured: 1.1 ms in whole segments on one link)."""
LEAST_S, MOST_S = 0.2e-3, 3e-3
"""What is believed of what was seen: a copy may stand still for other reasons."""
_WEIGHT = 0.25
"""Of the newest."""
_FEWEST = 8
"""Made beside a copy, to learn from."""


def ahead(sizes: Sequence[int], bytes_per_s: float, beside_s: float) -> int:
    """How many of the blocks, in the order in which they travel, are to be there before the first one leaves.

    With that many the links never wait for memory if each of the rest takes `beside_s`; more would only delay the first byte.
    """
    rest = sum(sizes)
    shortest, longest = rest / bytes_per_s, 0.0
    for number, size in enumerate(sizes, 1):
        longest = max(longest, number * beside_s + rest / bytes_per_s)
        rest -= size
    return min(len(sizes), math.ceil(round((longest - shortest) / beside_s, 6)))


class Making:
    """Of one device; used by its lane's thread."""

    def __init__(self) -> None:
        self.beside_s = BESIDE_S

    def saw(self, early: int, made: int, seconds: float) -> None:
        """So many were made ahead, and so many beside a copy in this time."""
        if early + made < 2 * _FEWEST:
            return  # of a small set: it tells nothing
        if made < _FEWEST:  # all were made ahead; what was believed fades, or it would never be put to the test again
            self.beside_s = max(LEAST_S, self.beside_s * (1 - _WEIGHT / 4))
        else:
            seen = min(max(seconds / made, LEAST_S), MOST_S)
            self.beside_s += _WEIGHT * (seen - self.beside_s)
