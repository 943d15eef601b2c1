"""Shares of devices: sizes, exclusion, coalescing, and never another device than asked."""

from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from controlplane.decisions.placement import SHARES, Slot, blocks, mask, occupied, place, smallest_share
from controlplane.fleet import Device, Fleet, Grant

GIB = 1 << 30


def fleet_with(*held: tuple[str, int, int], devices: int = 2) -> Fleet:
    """Grants (device, offset, cells) on so many devices."""
    return Fleet(
        devices=Map(
            {f"dev{n}": Device(device=f"dev{n}", node="n1", name=f"cpu{n}", kind="cpu", size_bytes=GIB) for n in range(devices)}
        ),
        grants=Map(
            {
                n: Grant(number=n, node="n1", device=d, instance=f"ins_{n}", offset=o, cells=c, since_ms=0)
                for n, (d, o, c) in enumerate(held, 1)
            }
        ),
    )


def test_half_a_device_is_a_half_a_quarter_a_quarter_an_eighth_an_eighth() -> None:  # N9
    for need, cells in ((GIB, 8), (GIB // 2, 4), (GIB // 4, 2), (GIB // 8, 1)):
        assert smallest_share(need, GIB) == cells
        assert smallest_share(need + 1, GIB) == (None if cells == 8 else cells * 2)
    assert smallest_share(1, GIB) == 1


@given(st.integers(1, 1 << 45), st.integers(1, 1 << 45))
def test_the_smallest_share_holds_the_need_and_the_next_smaller_one_does_not(need: int, device: int) -> None:
    cells = smallest_share(need, device)
    if cells is None:
        assert need > device
    else:
        assert need * 8 <= cells * device
        assert cells == 1 or need * 8 > cells // 2 * device


def test_a_held_device_is_refused_and_had_again_after_release() -> None:  # SL1
    assert place(fleet_with(("dev0", 0, 8), devices=1), {"dev0": 8}) is None
    assert place(fleet_with(("dev0", 0, 8), devices=1), {"dev0": 1}) is None
    assert place(fleet_with(devices=1), {"dev0": 8}) == Slot("dev0", 0, 8)


def test_a_busy_device_is_never_served_from_another() -> None:  # SL2
    assert place(fleet_with(("dev1", 0, 8)), {"dev1": 8}) is None
    assert place(fleet_with(("dev1", 0, 8)), {"dev1": 4}) is None


def test_two_halves_coalesce_once_both_are_free() -> None:  # SL4
    assert place(fleet_with(("dev0", 0, 4), ("dev0", 4, 4), devices=1), {"dev0": 8}) is None
    half = fleet_with(("dev0", 4, 4), devices=1)
    assert place(half, {"dev0": 8}) is None
    assert place(half, {"dev0": 4}) == Slot("dev0", 0, 4)
    assert place(fleet_with(devices=1), {"dev0": 8}) == Slot("dev0", 0, 8)


def test_the_smallest_free_node_is_broken_up_first() -> None:
    """A quarter goes beside the other quarter; the free half and the free device stay whole."""
    assert place(fleet_with(("dev0", 0, 2)), {"dev0": 2, "dev1": 2}) == Slot("dev0", 2, 2)


def test_reserved_cells_are_left_alone() -> None:
    assert place(fleet_with(devices=1), {"dev0": 4}, {"dev0": mask(0, 4)}) == Slot("dev0", 4, 4)
    assert place(fleet_with(devices=1), {"dev0": 8}, {"dev0": mask(0, 1)}) is None


@given(st.lists(st.tuples(st.sampled_from(SHARES), st.booleans()), max_size=40), st.integers(1, 3))
def test_random_takes_and_releases_never_overlap_and_leave_no_room_unused(steps: list[tuple[int, bool]], devices: int) -> None:
    held: list[tuple[str, int, int]] = []
    for cells, release in steps:
        if release and held:
            held.pop(len(held) // 2)
        fleet = fleet_with(*held, devices=devices)
        slot = place(fleet, dict.fromkeys(fleet.devices, cells))
        taken = occupied(fleet)
        if slot is None:
            assert all(b.mask & taken[d] for d in fleet.devices for b in blocks(d, cells))
            continue
        assert not slot.mask & taken[slot.device]
        assert slot.offset % slot.cells == 0
        held.append((slot.device, slot.offset, slot.cells))
