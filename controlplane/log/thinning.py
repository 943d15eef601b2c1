"""Which snapshots stay: the newest ones, and of those before them a thin row, as long as the log is. Pure."""

from collections.abc import Collection
from itertools import pairwise
from typing import Final, NamedTuple

NEWEST: Final = 3
"""All of them stay: a start goes on from near the head while one of them is whole."""
APART: Final = 100_000
"""Events between neighbours of the row, at most: folded in less than a second, which is a small part of the time that a look
has (`past.DEADLINE_S`), however long the log. So many events take some 40 MB of the log, a snapshot some KB to some hundred."""


class Place(NamedTuple):
    """What tells snapshots apart. By position, then by version."""

    position: int
    evolve_version: int


def leaving(stored: Collection[Place], evolve_version: int) -> list[Place]:
    """Which of the stored ones go, now that one of `evolve_version` has been stored. What stays is

    1. the NEWEST of that version;
    2. an older one of that version without which its neighbours would be more than APART events apart (the empty fleet, at 0,
       is the first neighbour): nowhere are there more than APART events between two, unless none was taken there;
    3. of other versions, which are of no use to this release, what is among the NEWEST of all: a release that is gone back to
       soon starts from them, and they leave as this one's come.
    """
    newest_first = sorted(stored, reverse=True)
    ours = [place for place in newest_first if place.evolve_version == evolve_version]
    staying = {*newest_first[:NEWEST], *ours[:NEWEST]}
    before = 0
    for place, after in pairwise(reversed(ours)):
        if place not in staying and after.position - before <= APART:
            continue
        staying.add(place)
        before = place.position
    return [place for place in newest_first if place not in staying]
