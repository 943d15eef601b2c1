"""Which segments of a set share one allocation of device memory. Pure.

An engine's segments lie at addresses of its own, most of them side by side, and one allocation may be mapped over all that do.
Making one, and mapping one, takes a millisecond beside a copy whatever its size, and the two get in each other's way: 149
segments one by one take 325 ms, the bytes that fill them 275 (H200, PCIe 5).
"""

import itertools
from collections.abc import Collection, Sequence

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


def alone(count: int) -> Groups:
    """One a segment: what fits all, and what engines expect that know of nothing else."""
    return tuple((number,) for number in range(count))


def cut(groups: Groups, sizes: Sequence[int]) -> Groups:
    """The allocations to make for an engine with such neighbours. None given: one a segment.

    Raises ValueError unless each of the segments is in just one group, and something in each group.
    """
    groups = groups or alone(len(sizes))
    if not all(groups) or sorted(number for group in groups for number in group) != list(range(len(sizes))):
        raise ValueError(f"neighbours must name each of {len(sizes)} segments once")
    return _none_too_large(groups, sizes)


def fitting(made: Groups, groups: Groups) -> tuple[int, ...]:
    """Which of the allocations that were made for one engine another can map, with such neighbours. None given: it maps
    nothing, so all are fine."""
    if not groups:
        return tuple(range(len(made)))
    follows = {number: after for group in groups for number, after in itertools.pairwise(group)}
    return tuple(
        which for which, group in enumerate(made) if all(follows.get(one) == after for one, after in itertools.pairwise(group))
    )


def common(one: Groups, other: Groups) -> Groups:
    """What lies side by side for both."""
    follows = {number: after for group in other for number, after in itertools.pairwise(group)}
    found: list[tuple[int, ...]] = []
    for group in one:
        begun = 0
        for at, (number, after) in enumerate(itertools.pairwise(group), 1):
            if follows.get(number) != after:
                found.append(group[begun:at])
                begun = at
        found.append(group[begun:])
    return tuple(found)


def others(groups: Groups, sizes: Sequence[int], there: Collection[int]) -> Groups:
    """The allocations to make for an engine that has some of its segments already."""
    rest: list[tuple[int, ...]] = []
    for group in groups:
        runs = itertools.groupby(group, key=lambda number: number in there)
        rest += [tuple(run) for had, run in runs if not had]
    return _none_too_large(tuple(rest), sizes)


def _none_too_large(groups: Groups, sizes: Sequence[int]) -> Groups:
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
