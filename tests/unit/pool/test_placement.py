"""On which memory node a set comes to lie: recorded topologies, and what the nodes have left."""

import json
from pathlib import Path

import msgspec
import pytest

from pool.numa import MemoryNode
from pool.placement import RESERVE_BYTES, placed
from pool.topology import NO_TOPOLOGY, Topology

GIB = 1 << 30
TOPOLOGIES = Path(__file__).parent / "topologies"
SIZES = (4 * GIB, 1 * GIB, 2 * GIB, 1 * GIB)


def recorded(name: str) -> Topology:
    found = json.loads((TOPOLOGIES / f"{name}.json").read_text())
    return msgspec.convert({"places": found["places"], "peers": found["peers"]}, Topology)


def nodes(*free_gib: int) -> tuple[MemoryNode, ...]:
    return tuple(
        MemoryNode(number=number, total_bytes=512 * GIB, free_bytes=free * GIB + RESERVE_BYTES)
        for number, free in enumerate(free_gib)
    )


@pytest.mark.parametrize(("device", "node"), [("GPU-0", 0), ("GPU-3", 0), ("GPU-4", 1), ("GPU-7", 1)])
def test_a_set_for_a_gpu_lies_on_its_node(device: str, node: int) -> None:
    assert placed(SIZES, device, recorded("two-sockets-four-switches"), nodes(100, 100)) == (node,) * 4


def test_each_rank_of_a_gang_has_its_own_near() -> None:
    topology = recorded("no-nvlink")
    assert [set(placed(SIZES, device, topology, nodes(100, 100))) for device in ("GPU-1", "GPU-2")] == [{0}, {1}]


def test_what_the_node_has_no_room_for_lies_where_most_is_free() -> None:
    assert placed(SIZES, "GPU-0", recorded("two-sockets-four-switches"), nodes(6, 100)) == (0, 1, 0, 1)
    assert placed(SIZES, "GPU-0", recorded("two-sockets-four-switches"), nodes(0, 1)) == (0, 1, 0, 0), (
        "a preference, no refusal"
    )


def test_a_set_for_no_device_is_spread_over_the_nodes_that_have_devices() -> None:
    found = placed((GIB,) * 8, None, recorded("two-sockets-four-switches"), nodes(100, 100, 400))
    assert [found.count(node) for node in (0, 1, 2)] == [4, 4, 0]
    assert placed(SIZES, None, recorded("one-switch"), nodes(100, 400)) == (0,) * 4, "all devices are near that one"
    assert set(placed(SIZES, None, NO_TOPOLOGY, nodes(100, 108))) == {0, 1}
    assert set(placed(SIZES, None, NO_TOPOLOGY, nodes(0, 400))) == {1}, "the one with the room"


def test_a_guest_that_tells_no_node_spreads_what_is_for_a_device_too() -> None:
    assert set(placed((GIB,) * 4, "GPU-0", recorded("two-in-a-guest"), nodes(100, 100))) == {0, 1}


@pytest.mark.parametrize("topology", ["one-switch", "no-nvlink", "two-sockets-four-switches", "two-in-a-guest"])
def test_one_node_leaves_nothing_to_decide(topology: str) -> None:
    assert placed(SIZES, "GPU-0", recorded(topology), nodes(100)) == (None,) * 4
    assert placed(SIZES, "GPU-0", recorded(topology), ()) == (None,) * 4
