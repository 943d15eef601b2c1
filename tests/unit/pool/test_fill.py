"""What is done to fill a device, and in which order."""

import pytest

from pool.fill import RESERVE_BYTES, plan
from pool.residency import Refused
from pool.slabs import Slab, Slabs
from tests.fakegpu import FakeGpu

MIB = 1 << 20


def slabs(*parts: Slab) -> Slabs:
    return Slabs("ws_1", list(parts))


def test_pinned_segments_travel_first_while_the_rest_is_pinned() -> None:
    given = slabs(Slab(0, 4 * MIB, pinned=2 * MIB), Slab(0, 2 * MIB, pinned=2 * MIB), Slab(0, 2 * MIB, refused=True))
    steps = plan(FakeGpu(), given)
    assert [(step.segment, step.register) for step in steps] == [(1, False), (0, True), (2, False)]


def test_a_device_with_just_the_room_takes_it() -> None:
    given = slabs(Slab(0, 4 * MIB))
    assert len(plan(FakeGpu(total_bytes=4 * MIB + RESERVE_BYTES), given)) == 1


def test_one_byte_too_few_is_refused_with_both_numbers_and_who_has_the_rest() -> None:
    gpu = FakeGpu(total_bytes=4 * MIB + RESERVE_BYTES, foreign_bytes=1)
    with pytest.raises(Refused, match=r"4194304 bytes on GPU-fake, 4194303 .*process 4711 has 1") as refused:
        plan(gpu, slabs(Slab(0, 4 * MIB)))
    assert refused.value.refusal.code == "device_full"
    assert (refused.value.refusal.need_bytes, refused.value.refusal.free_bytes) == (4 * MIB, 4 * MIB - 1)


def test_segments_that_a_device_cannot_hold_are_refused() -> None:
    with pytest.raises(Refused) as refused:
        plan(FakeGpu(), slabs(Slab(0, 4096)))
    assert refused.value.refusal.code == "bad_layout"
