"""Over which links a set travels: recorded topologies, and what the devices are doing."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from pool.paths import PIECE_BYTES, RING_BYTES, SMALLEST_BYTES, Dealer, Load, choose, pieces
from pool.topology import LINK_BYTES_PER_S, Place, Topology, read_topology

GIB = 1 << 30
IDLE = Load(free_bytes=8 * GIB)
TOPOLOGIES = Path(__file__).parent / "topologies"


def recorded(name: str) -> Topology:
    found = json.loads((TOPOLOGIES / f"{name}.json").read_text())
    return msgspec.convert({"places": found["places"], "peers": found["peers"]}, Topology)


def chosen(topology: Topology, loads: Mapping[str, Load] | None = None, target: str = "GPU-0", size: int = 15 * GIB):
    everybody = {place.device: IDLE for place in topology.places if place.device != target}
    return choose(target, size, topology, {**everybody, **(loads or {})}, reserve_bytes=64 << 20)


def helpers(topology: Topology, **more: object) -> list[str | None]:
    return [path.via for path in chosen(topology, **more)]  # type: ignore[arg-type]


def test_helpers_have_links_of_their_own_and_those_of_the_same_socket_come_first() -> None:
    found = helpers(recorded("two-sockets-four-switches"))
    assert found == [None, "GPU-2", "GPU-4", "GPU-6"], "one behind each switch but the target's own"


def test_the_other_socket_looks_the_other_way_round() -> None:
    assert helpers(recorded("two-sockets-four-switches"), target="GPU-5") == [None, "GPU-6", "GPU-0", "GPU-2"]


def test_behind_one_switch_nobody_helps() -> None:
    assert helpers(recorded("one-switch")) == [None]


def test_without_nvlink_the_set_goes_by_its_own_link() -> None:
    assert helpers(recorded("no-nvlink")) == [None]


def test_two_equal_links_take_half_each() -> None:
    own, other = chosen(recorded("two-in-a-guest"))
    assert (own.share, other.via, other.share) == (0.5, "GPU-1", 0.5)


def test_one_way_reach_is_not_enough() -> None:
    topology = msgspec.structs.replace(recorded("two-in-a-guest"), peers=frozenset({("GPU-0", "GPU-1")}))
    assert helpers(topology) == [None], "the target reaching the helper moves nothing"


@pytest.mark.parametrize(
    "load",
    [
        Load(free_bytes=8 * GIB, copying=True),
        Load(free_bytes=RING_BYTES),
        Load(free_bytes=8 * GIB, decoding=True, loss=0.6),
    ],
    ids=["copying for itself", "no room for a ring", "its decoding would suffer"],
)
def test_who_cannot_afford_it_does_not_help(load: Load) -> None:
    assert helpers(recorded("two-in-a-guest"), loads={"GPU-1": load}) == [None]


def test_a_neighbour_takes_the_place_of_one_that_is_busy() -> None:
    found = helpers(recorded("two-sockets-four-switches"), loads={"GPU-2": Load(free_bytes=8 * GIB, copying=True)})
    assert found == [None, "GPU-3", "GPU-4", "GPU-6"]


def test_the_idle_one_of_two_behind_a_switch_is_taken() -> None:
    busy = Load(free_bytes=8 * GIB, decoding=True)
    assert "GPU-3" in helpers(recorded("two-sockets-four-switches"), loads={"GPU-2": busy})


def test_a_decoding_helper_is_slowed_to_what_it_can_bear() -> None:
    own, other = chosen(recorded("two-in-a-guest"), {"GPU-1": Load(free_bytes=8 * GIB, decoding=True, loss=0.1)})
    assert other.share == pytest.approx(1 / 3), "half of its rate beside a whole link"
    assert own.share + other.share == pytest.approx(1)


def test_decoding_that_hardly_suffers_helps_at_full_rate() -> None:
    _, other = chosen(recorded("two-in-a-guest"), {"GPU-1": Load(free_bytes=8 * GIB, decoding=True, loss=0.02)})
    assert other.share == 0.5


def test_a_small_set_goes_alone() -> None:
    assert helpers(recorded("two-in-a-guest"), size=SMALLEST_BYTES - 1) == [None]
    assert helpers(recorded("two-in-a-guest"), size=SMALLEST_BYTES) == [None, "GPU-1"]


def test_a_device_that_nobody_knows_goes_alone() -> None:
    assert helpers(Topology(places=())) == [None]


def test_a_device_that_tells_nothing_does_not_help() -> None:
    assert [path.via for path in choose("GPU-0", GIB, recorded("two-in-a-guest"), {}, reserve_bytes=0)] == [None]


# ---- dealing ------------------------------------------------------------------------------------------------


def test_shares_are_kept_from_the_first_piece_to_the_last() -> None:
    dealer = Dealer([0.5, 0.25, 0.25])
    dealt = [dealer.deal(PIECE_BYTES) for _ in range(400)]
    assert [dealt.count(number) for number in range(3)] == [200, 100, 100]
    assert set(dealt[:4]) == {0, 1, 2}, "all are busy at once"


def test_crumbs_go_by_the_direct_link() -> None:
    dealer = Dealer([0.5, 0.5])
    assert [dealer.deal(2 << 20) for _ in range(9)] == [0] * 9
    assert dealer.deal(PIECE_BYTES) == 1


def test_pieces_cover_a_segment() -> None:
    assert list(pieces(70 << 20)) == [(0, PIECE_BYTES), (PIECE_BYTES, PIECE_BYTES), (2 * PIECE_BYTES, 6 << 20)]


# ---- sysfs --------------------------------------------------------------------------------------------------


def bus(tmp_path: Path, device: str, above: str, node: str) -> None:
    place = tmp_path / "devices" / above / device
    place.mkdir(parents=True)
    (place / "numa_node").write_text(f"{node}\n")
    (tmp_path / "bus").mkdir(exist_ok=True)
    (tmp_path / "bus" / device).symlink_to(place)


def test_what_hangs_behind_a_bridge_shares_its_way_up(tmp_path: Path) -> None:
    bus(tmp_path, "0000:18:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0", "0")
    bus(tmp_path, "0000:2a:00.0", "pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0", "0")
    bus(tmp_path, "0000:9a:00.0", "pci0000:97/0000:97:01.0", "1")
    found = read_topology({"a": "0000:18:00.0", "b": "0000:2A:00.0", "c": "0000:9a:00.0"}, [], sysfs=tmp_path / "bus")
    assert found.places == (
        Place(device="a", uplink="0000:15:01.0", node=0),
        Place(device="b", uplink="0000:15:01.0", node=0),
        Place(device="c", uplink="0000:97:01.0", node=1),
    )


def test_right_below_the_root_every_device_has_a_link_of_its_own(tmp_path: Path) -> None:
    bus(tmp_path, "0000:00:04.0", "pci0000:00", "-1")
    bus(tmp_path, "0000:00:05.0", "pci0000:00", "-1")
    found = read_topology({"a": "0000:00:04.0", "b": "0000:00:05.0"}, [], sysfs=tmp_path / "bus")
    assert [(place.uplink, place.node) for place in found.places] == [("0000:00:04.0", None), ("0000:00:05.0", None)]


def test_a_bus_that_tells_nothing_leaves_every_device_its_own_link(tmp_path: Path) -> None:
    found = read_topology({"a": "0000:00:04.0"}, [], sysfs=tmp_path)
    assert found.places == (Place(device="a", uplink="0000:00:04.0"),)


@pytest.mark.parametrize(
    ("link", "part"),
    [
        ((5, 16), 1.0),
        ((4, 16), 0.5),
        ((5, 8), 0.5),
        ((3, 16), 0.25),
        ((6, 16), 2.0),
        ((5, 32), 1.0),
        ((1, 1), 1.0),
        (None, 1.0),
    ],
    ids=[
        "as measured",
        "fourth",
        "half of the lanes",
        "third",
        "sixth",
        "a virtual port's lanes",
        "a virtual port's",
        "not told",
    ],
)
def test_a_link_is_as_fast_as_its_generation_and_lanes(tmp_path: Path, link: tuple[int, int] | None, part: float) -> None:
    topology = read_topology({"a": "0000:00:04.0"}, [], {"a": link} if link else {}, sysfs=tmp_path)
    assert topology.bytes_per_s("a") == part * LINK_BYTES_PER_S
    assert topology.bytes_per_s("unknown") == LINK_BYTES_PER_S


def test_a_path_that_is_left_out_is_dealt_nothing_more_and_what_it_had_is_the_first_ones() -> None:
    dealer = Dealer([0.5, 0.25, 0.25])
    first = [dealer.deal(PIECE_BYTES) for _ in range(4)]
    assert sorted(first) == [0, 0, 1, 2]
    dealer.leave_out(1)
    dealer.leave_out(1)
    dealer.take_over(1, PIECE_BYTES)
    rest = [dealer.deal(PIECE_BYTES) for _ in range(4)]
    assert 1 not in rest
    assert dealer.dealt == [sum(dealer.dealt) - dealer.dealt[2], 0, dealer.dealt[2]]
    assert abs(dealer.dealt[0] - 2 * dealer.dealt[2]) <= 2 * PIECE_BYTES
