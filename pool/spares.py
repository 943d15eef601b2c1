"""Segments without a set: memory that the host has given already, so that nobody waits for pages. Which to have is pure."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pool.huge import allocate
from pool.nodes import Nodes
from pool.slabs import Slab


@dataclass(eq=False)
class Spare:
    path: Path
    fd: int
    """Open for reading and writing."""
    size: int
    dirty: bool
    """An earlier set's bytes are in it: gaps between tensors are to be zeroed."""
    slab: Slab | None = None
    """Where there are devices: the daemon's mapping, pinned or about to be."""
    node: int | None = None
    """Memory node that it lies on, where there are several."""

    @property
    def to_pin(self) -> bool:
        return self.slab is None or self.slab.to_pin

    def become(self, path: Path, size: int) -> None:
        """The segment of a set, of this size. Raises OSError: then it is as large as it was."""
        try:
            self.path.rename(path)
            self.path = path
            if size < self.size:
                os.ftruncate(self.fd, size)
            elif size > self.size:
                allocate(self.fd, self.size, size - self.size)
        except OSError:
            os.ftruncate(self.fd, self.size)  # where it shall lie was said of the longer one already
            raise
        self.size = size

    def lie_ready(self, path: Path) -> None:
        """No set's any more: there, and open, with that set's bytes in it. Raises OSError: then it is as it was."""
        fd = self.fd
        if fd < 0:  # sealed
            os.chmod(self.path, 0o600)
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.path = self.path.rename(path)
        except OSError:
            if fd != self.fd:
                os.close(fd)
            raise
        self.fd, self.dirty = fd, True


class Make(msgspec.Struct, frozen=True):
    size_bytes: int


class Shed(msgspec.Struct, frozen=True):
    size_bytes: int


def next_step(have: Sequence[int], wanted: Sequence[int], allowed_bytes: int) -> Make | Shed | None:
    """Towards as many of the wanted sizes as are allowed, the first ones first.

    1. too much: shed a size that nobody wants, else the largest;
    2. a wanted size is missing and fits: make it;
    3. it would fit in the place of what nobody wants: shed that.
    """
    surplus = Counter(have) - Counter(wanted)
    if sum(have) > allowed_bytes:
        return Shed(max(surplus or have))
    kept = sum(have) - sum(size * count for size, count in surplus.items())
    missing = Counter(wanted) - Counter(have)
    for size in wanted:
        if missing[size] and sum(have) + size <= allowed_bytes:
            return Make(size)
        if missing[size] and surplus and kept + size <= allowed_bytes:
            return Shed(max(surplus))
    return None


def least_wanted(have: Sequence[Spare], size: int, wanted: Sequence[int], nodes: Sequence[int | None] = ()) -> Spare:
    """Of those of a size, one of the memory node that has most more of them than are wanted there; the first, if none has."""
    planned = Counter(node for each, node in zip(wanted, nodes, strict=False) if each == size)
    sized = [spare for spare in have if spare.size == size]
    there = Counter(spare.node for spare in sized)
    return max(sized, key=lambda spare: there[spare.node] - planned[spare.node] if planned else 0)


def adopted(path: Path, nodes: Nodes) -> Spare | None:
    """A file that was wholly given by the host; anything else goes."""
    state = path.stat()
    if not state.st_size or state.st_blocks * 512 < state.st_size:
        path.unlink()
        return None
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    found = nodes.found([fd], [state.st_size])
    return Spare(path, fd, state.st_size, dirty=True, node=found[0] if found else None)


def matched(have: Sequence[Spare], sizes: Sequence[int], nodes: Sequence[int | None] = ()) -> dict[int, Spare]:
    """Which spare becomes which segment: equal sizes first, then any within a factor of two; a mapped one keeps its size.

    nodes: where each segment shall lie. A spare of another one stays: its pages don't move, and each copy would cross.
    """
    left, found = list(have), dict[int, Spare]()

    def lies_well(spare: Spare, number: int) -> bool:
        return not nodes or nodes[number] is None or spare.node in {None, nodes[number]}

    for number, size in enumerate(sizes):
        if (spare := next((one for one in left if one.size == size and lies_well(one, number)), None)) is not None:
            found[number] = spare
            left.remove(spare)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size = sizes[number]
        near = [
            one
            for one in left
            if one.slab is None and max(one.size, size) <= 2 * min(one.size, size) and lies_well(one, number)
        ]
        if number not in found and near:
            found[number] = spare = min(near, key=lambda one: abs(one.size - size))
            left.remove(spare)
    return found
