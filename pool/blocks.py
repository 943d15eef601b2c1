"""Which segments of a set share one allocation of device memory. Pure.

An engine's segments lie at addresses of its own, most of them side by side, and one allocation may be mapped over all that do.
Making one, and mapping one, takes a millisecond beside a copy whatever its size, and the two get in each other's way: 149
segments one by one take 325 ms, the bytes that fill them 275 (H200, PCIe 5).
"""

import itertools
from collections.abc import Sequence

Groups = tuple[tuple[int, ...], ...]
"""Numbers of segments, each group in the order in which its segments lie in memory, without gaps."""

MOST_BYTES = 1 << 30
"""Of one allocation, unless a segment alone is larger: 20 ms of one link, so that bytes travel while the next one is made."""


def neighbours(places: Sequence[tuple[int, int]]) -> Groups:
    """places: address and size of each segment. Those that lie side by side, as far as they go."""
    found: list[list[int]] = []
    end = None
    for number in sorted(range(len(places)), key=lambda one: places[one][0]):
        address, size = places[number]
        if address == end:
            found[-1].append(number)
        else:
            found.append([number])
        end = address + size
    return tuple(tuple(group) for group in found)


def cut(groups: Groups, sizes: Sequence[int]) -> Groups:
    """The allocations to make for an engine with such neighbours. None given: one a segment, which fit all.

    Raises ValueError unless each of the segments is in just one group.
    """
    groups = groups or tuple((number,) for number in range(len(sizes)))
    if sorted(number for group in groups for number in group) != list(range(len(sizes))):
        raise ValueError(f"neighbours must name each of {len(sizes)} segments once")
    made: list[list[int]] = []
    for group in groups:
        made.append([])
        room = MOST_BYTES
        for number in group:
            if made[-1] and sizes[number] > room:
                made.append([])
                room = MOST_BYTES
            made[-1].append(number)
            room -= sizes[number]
    return tuple(tuple(group) for group in made)


def fits(made: Groups, groups: Groups) -> bool:
    """Whether an engine with such neighbours can map allocations that were made for another one. None given: it maps none."""
    if not groups:
        return True
    follows = {number: after for group in groups for number, after in itertools.pairwise(group)}
    return all(follows.get(number) == after for group in made for number, after in itertools.pairwise(group))
