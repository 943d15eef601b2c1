"""Where the daemon has put what: plans are carried out here, and what the kernel does not let us do is told, not hidden."""

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from pool import numa
from pool.numa import MemoryNode
from pool.placement import placed
from pool.topology import NO_TOPOLOGY, Topology

log = logging.getLogger("pool")


class Nodes:
    """Used by any thread. in_memory: segments are shared memory; files on a disk lie wherever the kernel caches them."""

    def __init__(
        self,
        topology: Topology = NO_TOPOLOGY,
        *,
        in_memory: bool = True,
        read: Callable[[], tuple[MemoryNode, ...]] = numa.read_nodes,
    ) -> None:
        self.topology = topology
        self._read = read
        self._why = "" if in_memory else "segments lie in files on a disk"

    @property
    def state(self) -> str:
        """`one node`, `placed`, or why not."""
        if len(self._read()) < 2:
            return "one node"
        return f"not placed: {self._why}" if self._why else "placed"

    def nodes(self) -> tuple[MemoryNode, ...]:
        return self._read()

    def plan(self, sizes: Sequence[int], device: str | None, ready: Mapping[int | None, int]) -> tuple[int | None, ...]:
        """ready: node -> bytes there that have been taken from it and make room for these."""
        if self._why:
            return (None,) * len(sizes)
        nodes = [msgspec.structs.replace(node, free_bytes=node.free_bytes + ready.get(node.number, 0)) for node in self._read()]
        return placed(sizes, device, self.topology, nodes)

    def prefer(self, fd: int, size: int, node: int | None) -> None:
        """Before pages are touched. Whatever the kernel says, they can be touched: only their place is then its own choice."""
        if node is None or self._why:
            return
        try:
            numa.prefer_file(fd, size, node)
        except OSError as error:
            self._refused(error)

    def found(self, fds: Sequence[int], sizes: Sequence[int]) -> tuple[int | None, ...]:
        """Where segments lie, by the kernel's word; `()` where there is nothing to choose, or it does not tell."""
        if self._why or len(self._read()) < 2:
            return ()
        try:
            return tuple(numa.node_of_file(fd, size) for fd, size in zip(fds, sizes, strict=True))
        except OSError as error:
            self._refused(error)
            return ()

    def _refused(self, error: OSError) -> None:
        if not self._why:
            self._why = str(error)
            log.warning("not_placed", extra={"why": self._why})
