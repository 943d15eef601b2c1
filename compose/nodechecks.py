"""Whether weights can be placed on the memory node of the GPU that they are for, and where those of a running plane lie."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from compose.check import Check
from controlplane.plane import Plane
from controlplane.quantities import human_bytes
from pool import numa
from pool.client import PoolClient, PoolRefused
from pool.described import Described
from pool.numa import MemoryNode

_CURE: Final = "Let the plane say where its pages lie (docker: --cap-add SYS_NICE); until then some copies cross sockets."


def node_check(data: Path, *, running: bool) -> Check:
    nodes = numa.read_nodes()
    return found(nodes, _refused(nodes), _described(data) if running and len(nodes) > 1 else None)


def found(nodes: Sequence[MemoryNode], refused: str, described: Described | None) -> Check:
    """refused: the kernel's reason, if it places nothing. described: of the pool that runs."""
    if len(nodes) < 2:
        return Check(name="memory nodes", verdict="ok", found="one: every GPU is as near to all memory as the next")
    each = ", ".join(f"{node.number} with {human_bytes(node.free_bytes)} of {human_bytes(node.total_bytes)}" for node in nodes)
    why = refused or (described.placement.partition(": ")[2] if described is not None else "")
    if why:
        return Check(name="memory nodes", verdict="note", found=f"{each}; weights are not placed: {why}", cure=_CURE)
    lies: Counter[int] = Counter()
    for one in described.sets if described is not None else ():
        lies.update(one.node_bytes)
    where = "".join(f"; weights on {node}: {human_bytes(size)}" for node, size in sorted(lies.items()))
    return Check(name="memory nodes", verdict="ok", found=f"{each}{where}")


def _refused(nodes: Sequence[MemoryNode]) -> str:
    """Tried on a page of memory."""
    if len(nodes) < 2:
        return ""
    fd = os.memfd_create("doctor", os.MFD_CLOEXEC)
    try:
        numa.prefer_file(fd, os.sysconf("SC_PAGE_SIZE"), nodes[0].number)
    except OSError as error:
        return str(error)
    finally:
        os.close(fd)
    return ""


def _described(data: Path) -> Described | None:
    async def ask() -> Described:
        async with await PoolClient.connect(Path(Plane.read(data).pool_socket)) as client:
            return await client.describe(deadline_s=2.0)

    try:
        return asyncio.run(ask())
    except (OSError, PoolRefused):  # other lines say what is wrong with a pool that does not answer
        return None
