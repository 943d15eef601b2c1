"""What the kernel is asked for: on this machine's own nodes, and where it says no."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool import numa
from pool.arena import Arena
from pool.mapping import map_shared, unmap
from pool.nodes import Nodes
from pool.numa import MemoryNode, read_nodes
from pool.spares import Spare, matched
from pool.topology import Place, Topology

MIB = 1 << 20
SIZE = 4 * MIB
GIB = 1 << 30


def allowed() -> bool:
    """Whether this machine lets a process say where its pages lie (containers forbid it)."""
    address = map_shared(os.memfd_create("pages"), 4096) if read_nodes() else 0
    try:
        numa.prefer(address, 4096, read_nodes()[0].number)
    except (OSError, IndexError):
        return False
    finally:
        if address:
            unmap(address, 4096)
    return True


on_a_machine_that_lets_us = pytest.mark.skipif(not allowed(), reason="mbind is not permitted here")


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("segment")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


def policy_of(address: int) -> str:
    found = re.search(rf"^{address:x} (\S+)", Path("/proc/self/numa_maps").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


@on_a_machine_that_lets_us
def test_a_preference_stays_with_the_file_and_its_pages_follow_it(file: int) -> None:
    node = read_nodes()[0].number
    numa.prefer_file(file, SIZE, node)
    os.posix_fallocate(file, 0, SIZE)  # another mapping than the one that was told, and none at all here
    address = map_shared(os.dup(file), SIZE)
    try:
        assert policy_of(address) == f"prefer:{node}"
        assert set(numa.where(address, SIZE)) == {node}
    finally:
        unmap(address, SIZE)
    assert numa.node_of_file(file, SIZE) == node


def test_a_node_that_there_is_not_is_an_error_of_the_kernels(file: int) -> None:
    with pytest.raises(OSError, match="mbind"):
        numa.prefer_file(file, SIZE, 900)


def test_nodes_are_read_with_what_they_have_left(tmp_path: Path) -> None:
    for number, total in ((0, 1024), (10, 2048), (2, 0)):
        path = tmp_path / f"node{number}"
        path.mkdir()
        lines = {"MemTotal": total, "MemFree": total // 2, "Inactive(file)": 100}
        (path / "meminfo").write_text("".join(f"Node {number} {name}:  {size} kB\n" for name, size in lines.items()))
    (tmp_path / "node3").mkdir()
    small = MemoryNode(number=0, total_bytes=1 * MIB, free_bytes=(512 + 100) << 10)
    large = MemoryNode(number=10, total_bytes=2 * MIB, free_bytes=(1024 + 100) << 10)
    status = tmp_path / "status"
    assert read_nodes(tmp_path, status) == (small, large), "a kernel without cpusets"
    for allowed, found in (("0-3,10", (small, large)), ("0", (small,)), ("2-10", (large,))):
        status.write_text(f"Name:\tpool\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")
        assert read_nodes(tmp_path, status) == found, "a container has what its cpuset leaves it"


def two() -> tuple[MemoryNode, ...]:
    return tuple(MemoryNode(number=number, total_bytes=64 * GIB, free_bytes=32 * GIB) for number in (0, 1))


def for_second() -> Topology:
    return Topology(places=(Place(device="GPU-1", uplink="0000:01:00.0", node=1),))


def test_a_kernel_that_refuses_is_told_of_and_asked_no_more(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuses(fd: int, size: int, node: int) -> None:
        asked.append(node)
        raise PermissionError(1, "mbind: Operation not permitted")

    monkeypatch.setattr(numa, "prefer_file", refuses)
    nodes = Nodes(for_second(), read=two)
    assert (nodes.state, nodes.plan((SIZE,), "GPU-1", {})) == ("placed", (1,))
    for _ in range(2):
        nodes.prefer(file, SIZE, 1)
    assert asked == [1]
    assert nodes.state == "not placed: [Errno 1] mbind: Operation not permitted"
    assert nodes.plan((SIZE,), "GPU-1", {}) == (None,)


def test_one_node_and_files_on_a_disk_are_left_to_the_kernel(file: int) -> None:
    assert Nodes(for_second(), read=lambda: two()[:1]).state == "one node"
    on_disk = Nodes(for_second(), in_memory=False, read=two)
    assert (on_disk.state, on_disk.plan((SIZE,), "GPU-1", {})) == ("not placed: segments lie in files on a disk", (None,))
    assert on_disk.found([file], [SIZE]) == ()


def test_a_draft_asks_for_its_segments_places_before_it_takes_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(numa, "prefer_file", lambda fd, size, node: told.append((os.fstat(fd).st_blocks, size, node)))
    arena = Arena(tmp_path)
    arena.nodes = Nodes(for_second(), read=two)
    draft = arena.begin((SIZE, MIB), {})
    draft.use({}, arena.nodes.plan((SIZE, MIB), "GPU-1", {}))
    for number in range(2):
        draft.allocate(number)
    assert told == [(0, SIZE, 1), (0, MIB, 1)]
    draft.discard()


def test_memory_that_lies_ready_on_another_node_is_not_taken() -> None:
    far, near, anywhere = (Spare(Path(), -1, SIZE, dirty=False, node=node) for node in (0, 1, None))
    assert matched([far, near, anywhere], (SIZE,) * 3, (1, 1, 1)) == {0: near, 1: anywhere}
    assert matched([far], (SIZE,), (None,)) == {0: far}


def test_memory_that_lies_ready_on_a_node_is_room_there() -> None:
    full = tuple(MemoryNode(number=number, total_bytes=64 * GIB, free_bytes=free) for number, free in ((0, 32 * GIB), (1, 0)))
    nodes = Nodes(for_second(), read=lambda: full)
    assert nodes.plan((8 * GIB, 8 * GIB), "GPU-1", {}) == (0, 0)
    assert nodes.plan((8 * GIB, 8 * GIB), "GPU-1", {1: 10 * GIB, None: 8 * GIB}) == (1, 0)
