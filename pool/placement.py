"""On which memory node each segment of a set shall lie: pure, by the recorded topology and what the nodes have left.

1. one node: nothing to decide;
2. for a device: on the device's node, the rest where most is free once that has no more;
3. for no device yet, or one whose node is not told: dealt evenly over the nodes that have devices (over all, if none is known
   to have one) and room, so that whichever device wakes first finds half of it near, not all of it far.
"""

from collections.abc import Sequence

from pool.numa import MemoryNode
from pool.topology import Topology

RESERVE_BYTES = 1 << 30
"""Left on a node: the kernel reclaims and moves pages below it, which is slower than another socket."""


def placed(sizes: Sequence[int], device: str | None, topology: Topology, nodes: Sequence[MemoryNode]) -> tuple[int | None, ...]:
    """A node a segment; None: wherever the kernel puts it."""
    left = {node.number: node.free_bytes - RESERVE_BYTES for node in nodes}
    if len(left) < 2:
        return (None,) * len(sizes)
    own = _node(device, topology, left)
    near = {place.node for place in topology.places if place.node is not None and place.node in left} or set(left)
    given = dict.fromkeys(left, 0)
    found: dict[int, int] = {}
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        if own is not None and left[own] >= size:
            node = own
        elif own is not None:
            node = max((one for one in left if left[one] >= size), key=lambda one: (left[one], -one), default=own)
        else:
            roomy = [one for one in near if left[one] >= size] or [one for one in left if left[one] >= size] or list(near)
            node = min(roomy, key=lambda one: (given[one], -left[one], one))
        left[node] -= size
        given[node] += size
        found[number] = node
    return tuple(found[number] for number in range(len(sizes)))


def _node(device: str | None, topology: Topology, left: dict[int, int]) -> int | None:
    place = topology.place(device) if device is not None else None
    return place.node if place is not None and place.node in left else None
